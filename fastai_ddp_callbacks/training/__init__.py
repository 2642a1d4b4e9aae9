"What the callbacks of both fastai lines share. Imports no fastai."
