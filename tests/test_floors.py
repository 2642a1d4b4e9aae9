"The floors of the house: who may import whom. Every import in the package is read, those inside functions too."

import ast
from pathlib import Path

import pytest

import fastai_ddp_callbacks

PACKAGE = Path(fastai_ddp_callbacks.__file__).parent
FILES = sorted(PACKAGE.rglob('*.py'))
# from the ground up; those of one floor may import each other where FRIENDS says so
FLOORS = [
    {'errors', 'process', 'installed', 'notice', 'signals'},
    {'distributed', 'checkpoint'},
    {'training', 'timeline'},
    {'fastai1', 'fastai2'},
    {''},  # the public names
    {'demo', 'commands'},
    {'cli', 'patch'},
]
FRIENDS = {('demo', 'commands')}
WITHOUT_FASTAI = {
    'errors',
    'process',
    'installed',
    'notice',
    'signals',
    'distributed',
    'checkpoint',
    'training',
    'timeline',
}


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix('').parts
    return list(parts[:-1] if parts[-1] == '__init__' else parts)


def imports(path):
    "Absolute dotted names of all that a file imports."
    package = ['fastai_ddp_callbacks', *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (o.name for o in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = '.'.join([*base, *filter(None, [node.module])])
            yield from (f'{prefix}.{o.name}' for o in node.names)


def room(dotted):
    "The folder or file at the top of the package that an absolute name of ours is in."
    parts = dotted.split('.')[1:]
    known = set.union(*FLOORS)
    return parts[0] if parts and parts[0] in known else ''


def floor(name):
    return next(i for i, o in enumerate(FLOORS) if name in o)


@pytest.mark.parametrize('path', FILES, ids=lambda o: '.'.join(module_of(o)) or '__init__')
def test_nobody_imports_from_a_higher_floor(path):
    here = (module_of(path) or [''])[0]
    above = [
        o
        for o in imports(path)
        if o.split('.')[0] == 'fastai_ddp_callbacks'
        and (there := room(o)) != here
        and (floor(there) > floor(here) or floor(there) == floor(here) and (here, there) not in FRIENDS)
    ]
    assert not above


@pytest.mark.parametrize('path', FILES, ids=lambda o: '.'.join(module_of(o)) or '__init__')
def test_the_lower_floors_never_import_fastai(path):
    here = (module_of(path) or [''])[0]
    foreign = {o.split('.')[0] for o in imports(path)} & {'fastai', 'fastcore', 'accelerate'}
    assert not foreign or here not in WITHOUT_FASTAI


def test_every_room_is_on_a_floor():
    assert {(module_of(o) or [''])[0] for o in FILES} <= set.union(*FLOORS)
