"Runs the folder fastai1, in a process where `fastai` is fastai 1, which is installed into a folder of its own."

import hashlib, os, shutil, subprocess, sys
from pathlib import Path

import pytest

# without what fastai 1 asks for and does not need here; it imports pkg_resources, which newer setuptools no longer have
FASTAI1 = ['fastai==1.0.61', 'bottleneck', 'numexpr', 'beautifulsoup4', 'soupsieve', 'setuptools<81']


@pytest.fixture(scope='session')
def fastai1(request):
    "A folder with fastai 1, for `PYTHONPATH`. Kept in pytest's cache, one for each version of Python."
    cache = request.config.cache.mkdir('fastai1')
    folder = cache / hashlib.sha256(f'{FASTAI1} {sys.version}'.encode()).hexdigest()[:16]
    if folder.exists():
        return folder
    part = cache / f'{folder.name}.{os.getpid()}'
    done = subprocess.run(
        [sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', part, *FASTAI1],
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        part.rename(folder)  # under its name it is whole
        return folder
    shutil.rmtree(part, ignore_errors=True)
    pytest.fail(f'fastai 1 could not be installed: {done.stderr.strip()[-500:]}')


@pytest.mark.timeout(400)
def test_the_callbacks_for_fastai_1_pass_their_own_tests(fastai1):
    here = Path(__file__).parent
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(fastai1), os.environ.get('PYTHONPATH')])))
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            here / 'fastai1',
            f'--confcutdir={here / "fastai1"}',
            f'--rootdir={here.parent}',
            '-c',
            here.parent / 'setup.cfg',
            '-p',
            'no:cacheprovider',
            '-W',
            'ignore',
        ],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
