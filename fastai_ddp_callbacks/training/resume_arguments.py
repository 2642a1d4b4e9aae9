"The arguments of the callbacks that resume fits, checked before anything else is done with them."

from __future__ import annotations
import math
from numbers import Integral, Real
from os import PathLike

__all__ = ['check_arguments', 'check_resume', 'check_name', 'check_whole_number', 'check_minutes', 'check_exit_status']


def check_resume(who: str, resume) -> None:
    "`ValueError` for what is none of its three values."
    if resume not in ('auto', 'must', 'never') or not isinstance(resume, str):
        raise ValueError(f"{who}(resume={resume!r}): choose 'auto', 'must' or 'never'.")


def check_name(who: str, argument: str, name) -> None:
    "`TypeError` or `ValueError` for what cannot be the first part of a file's name."
    if not isinstance(name, (str, PathLike)):
        raise TypeError(f'{who}({argument}={name!r}): a name without braces is needed.')
    if not str(name) or set('{}') & set(str(name)):
        raise ValueError(f'{who}({argument}={name!r}): a name without braces is needed.')


def check_whole_number(who: str, argument: str, value) -> None:
    "`TypeError` or `ValueError` for what is no whole number above 0."
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f'{who}({argument}={value!r}): a whole number above 0 is needed.')
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f'{who}({argument}={value!r}): a whole number above 0 is needed.')


def check_minutes(who: str, argument: str, value) -> None:
    "`TypeError` or `ValueError` for what is no finite number above 0."
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f'{who}({argument}={value!r}): a number above 0 is needed.')
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f'{who}({argument}={value!r}): a number above 0 is needed.')


def check_exit_status(who: str, argument: str, value) -> None:
    "`TypeError` or `ValueError` for what no process can end with."
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f'{who}({argument}={value!r}): a whole number from 0 to 255 is needed.')
    if int(value) not in range(256):
        raise ValueError(f'{who}({argument}={value!r}): a whole number from 0 to 255 is needed.')


def check_arguments(
    who: str,  # the callback, for messages
    resume,  # 'auto', 'must' or 'never'
    name,  # first part of the files' names, called `fname`
    exit_status,  # exit status after a signal
    keep,  # how many of the newest to keep
    every_epoch,  # save after so many epochs; None: never
    every_batches,  # save after so many batches; None: never
    every_minutes,  # save after so many minutes; None: never
) -> None:
    "`TypeError` or `ValueError`, with the argument's name, for what makes no sense."
    check_resume(who, resume)
    check_name(who, 'fname', name)
    check_exit_status(who, 'exit_status', exit_status)
    check_whole_number(who, 'keep', keep)
    if every_epoch is not None:
        check_whole_number(who, 'every_epoch', every_epoch)
    if every_batches is not None:
        check_whole_number(who, 'every_batches', every_batches)
    if every_minutes is not None:
        check_minutes(who, 'every_minutes', every_minutes)
