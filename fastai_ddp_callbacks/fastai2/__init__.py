"The callbacks for fastai 2."
