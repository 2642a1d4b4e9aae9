"What a rank that has failed tells the others: its exception, in few bytes."

from __future__ import annotations
import json, os, traceback

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), '')  # its frames
TEXT = 8192  # bytes per rank in the exchange of words, which only happens when something is wrong


def describe(error, place, rank):
    "An exception as a note, without the frames of ours through which it came."
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        tb = tb.tb_next
    frames = traceback.extract_tb(tb)
    if place is None:
        place = f'{frames[-1].name} at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}' if frames else ''
    try:
        text = str(error)
    except Exception as e:
        text = f'(its text cannot be had: {type(e).__name__})'
    return dict(
        kind='failed',
        rank=rank,
        place=str(place),
        type=type(error).__name__,
        text=text,
        traceback=''.join(traceback.format_exception(type(error), error, tb)),
    )


def pack(note):
    "A note in at most `TEXT` bytes; the beginning of the text and the end of the traceback are kept."
    note = {k: (v[-4000:] if k == 'traceback' else v[:1500]) if isinstance(v, str) else v for k, v in note.items()}
    while True:
        data = json.dumps(note, ensure_ascii=False).encode(errors='backslashreplace')
        if len(data) <= TEXT:
            return data
        longest = max((k for k in note if isinstance(note[k], str)), key=lambda k: len(note[k]))
        keep = len(note[longest]) // 2
        note[longest] = note[longest][-keep:] if longest == 'traceback' else note[longest][:keep]
