"What an editor or a type checker sees of the public surface."

import ast, re
from pathlib import Path
from typing import get_type_hints

import fastai_ddp_callbacks as ours
import pytest
from fastai_ddp_callbacks import errors

ERRORS = [getattr(errors, o) for o in errors.__all__]


@pytest.mark.parametrize('error', ERRORS, ids=lambda o: o.__name__)
def test_the_attributes_that_an_error_tells_of_are_declared(error):
    of = re.search(r'`\w+`.*:\s+(?:str|int|list|dict|exit)\b.*', error.__doc__.replace('\n', ' '))
    told = re.findall(r'`(\w+)`', of[0]) if of else []
    assert {*told} - {'code', 'errno'} <= get_type_hints(error).keys()  # these two are the system's


def test_every_name_that_is_imported_late_is_told_to_editors():
    tree = ast.parse(Path(ours.__file__).read_text())
    block = next(o for o in tree.body if isinstance(o, ast.If) and ast.unparse(o.test) == 'TYPE_CHECKING')
    told = {(o.module, a.asname or a.name) for o in block.body for a in o.names}
    assert not [k for k, module in {**ours._FASTAI2, **ours._BOTH}.items() if not {(module, k), (module, '*')} & told]


@pytest.mark.parametrize('decorator', [ours.main_process_only, ours.once_per_node])
def test_a_decorated_function_keeps_its_type(decorator):
    hints = get_type_hints(decorator)
    assert hints['func'] is hints['return']
