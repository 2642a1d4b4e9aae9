"Notes of failures, and the board on which the first one of each generation counts. No ranks: a store in this process."

import pytest, torch.distributed as dist

from fastai_ddp_callbacks import BarrierTimeoutError, RankFailedError
from fastai_ddp_callbacks.distributed import heard
from fastai_ddp_callbacks.distributed.failure import NOTE_SIZE, Board, Note, failed


def boom(text='boom'):
    raise ValueError(text)


def raised(*args):
    try:
        boom(*args)
    except ValueError as e:
        return e


def test_the_first_note_of_a_generation_counts_for_all():
    store = dist.HashStore()
    a, b = Board(store), Board(store)
    first, second = Note('failed', 0, 'here', text='first'), Note('failed', 1, 'there', text='second')
    assert [a.post(0, first), b.post(0, second), b.first(0), a.first(0)] == [first] * 4


def test_each_generation_has_a_note_of_its_own():
    board = Board(dist.HashStore())
    board.post(0, Note('failed', 0, 'here'))
    later = Note('dead', 1, 'there')
    assert (board.first(1), board.post(1, later), board.first(1)) == (None, later, later)


def test_a_note_of_an_exception_says_what_where_and_on_which_rank():
    note = failed(raised(), None, 3)
    assert (note.kind, note.rank, note.type, note.text) == ('failed', 3, 'ValueError', 'boom')
    assert note.place.startswith('boom at test_failure.py:')
    assert note.traceback.rstrip().endswith('ValueError: boom')


def test_a_place_that_is_given_takes_the_place_of_the_line():
    assert failed(raised(), 'loading batch 3', 0).place == 'loading batch 3'


def test_an_exception_whose_text_cannot_be_had_makes_a_note_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise AttributeError

    assert 'AttributeError' in failed(Mute(), 'here', 0).text


@pytest.mark.parametrize('text', ['long ' * 10000, '🚀' * 10000, '\x00 "quoted"\n' * 1000, ''])
def test_a_note_of_any_text_fits_and_keeps_its_beginning(text):
    data = failed(raised(text), text, 0).pack()
    assert len(data) <= NOTE_SIZE
    assert Note.unpack(data.ljust(NOTE_SIZE)).text[:20] == text[:20]


def test_a_note_keeps_bytes_that_are_no_text():
    assert Note.unpack(failed(raised('\udc80'), 'here', 0).pack()).text == '\udc80'


def test_the_end_of_a_long_traceback_is_kept():
    note = Note.unpack(Note('failed', 0, 'here', traceback='a' * 10000 + 'the end').pack())
    assert note.traceback.endswith('the end')


def test_a_note_of_a_failure_is_raised_with_its_parts():
    error = failed(raised(), 'saving', 2).error(0, "barrier('x')")
    assert isinstance(error, RankFailedError)
    assert str(error).startswith('rank 2 failed in saving: ValueError: boom\n(Raised on rank 0 at barrier(\'x\').)')
    assert (error.rank, error.place, error.error_type, error.error_text) == (2, 'saving', 'ValueError', 'boom')
    assert 'ValueError: boom' in error.traceback_text


def test_a_note_of_absence_is_raised_with_who_is_missing():
    error = Note('timeout', 0, 'here', text='waited', missing=[1, 2], seconds=3).error(1)
    assert isinstance(error, BarrierTimeoutError)
    assert (error.missing, error.seconds, error.place) == ([1, 2], 3, 'here')


# -- which errors all ranks have heard of


def test_an_error_is_known_in_the_blocks_that_were_open_when_all_heard_of_it():
    error = raised()
    with heard.listening() as outer, heard.listening() as inner:
        before = error in outer, error in inner
        heard.mark(error)
        assert (before, error in outer, error in inner) == ((False, False), True, True)


def test_in_a_later_block_it_is_news_again():
    error = raised()
    heard.mark(error)
    with heard.listening() as known:
        assert error not in known and error in heard.since_last_meeting


def test_when_the_ranks_have_met_it_is_news_again():
    error = raised()
    with heard.listening() as known:
        heard.mark(error)
        heard.forget()
        assert error not in known and error not in heard.since_last_meeting


def test_another_error_is_not_known():
    with heard.listening() as known:
        heard.mark(raised())
        assert raised() not in known


def test_blocks_may_end_in_any_order():
    first, second = heard.listening(), heard.listening()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    error = raised()
    heard.mark(error)
    second.__exit__(None, None, None)
    assert error in two and error not in one
