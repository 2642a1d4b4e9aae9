"Runs the folder fastai1, in processes where `fastai` is fastai 1, which is installed into a folder of its own."

import fcntl, hashlib, os, shutil, subprocess, sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# without what fastai 1 asks for and does not need here; it imports pkg_resources, which newer setuptools no longer have
FASTAI1 = ['fastai==1.0.61', 'bottleneck', 'numexpr', 'beautifulsoup4', 'soupsieve', 'setuptools<81']


@pytest.fixture(scope='session')
def fastai1(request):
    "A folder with fastai 1, for `PYTHONPATH`. Kept in pytest's cache, one for each version of Python."
    cache = request.config.cache.mkdir('fastai1')
    folder = cache / hashlib.sha256(f'{FASTAI1} {sys.version}'.encode()).hexdigest()[:16]
    with open(cache / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes that run these tests wait for what the first one installs
        if not folder.exists():
            install(folder)
    return folder


def install(folder):
    part = folder.with_name(f'{folder.name}.{os.getpid()}')
    command = [sys.executable, '-m', 'pip', 'install', '--no-deps', '--target', part, *FASTAI1]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        shutil.rmtree(part, ignore_errors=True)
        pytest.fail(f'fastai 1 could not be installed: {done.stderr.strip()[-500:]}')
    part.rename(folder)  # under its name it is whole


# Each process imports fastai 1 and has a server that does: what takes half a minute shares one.
PARTS = [
    ['test_demo1.py'],
    ['test_resume1.py', 'test_patch1.py'],
    ['test_keep1.py', 'test_evaluation1.py'],
    ['test_context1.py', 'test_save_model1.py', 'test_trackers1.py'],
]


def test_no_file_is_left_out():
    assert sorted(file for part in PARTS for file in part) == sorted(o.name for o in HERE.glob('fastai1/test_*.py'))


@pytest.mark.begins_early
@pytest.mark.timeout(400)
@pytest.mark.parametrize('part', PARTS, ids=lambda part: part[0])
def test_the_callbacks_for_fastai_1_pass_their_own_tests(fastai1, part):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(fastai1), os.environ.get('PYTHONPATH')])))
    command = [
        *(sys.executable, '-m', 'pytest', '--numprocesses=0', '-p', 'no:cacheprovider', '-W', 'ignore'),
        f'--confcutdir={HERE / "fastai1"}',
        f'--rootdir={HERE.parent}',
        *('-c', HERE.parent / 'setup.cfg'),
        *(HERE / 'fastai1' / file for file in part),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
