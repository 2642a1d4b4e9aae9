collect_ignore = ['fastai1'] # runs in a process of its own, see test_fastai1.py
