"""Which rank waited how long for which: the rendezvous as a table, as a picture, and as one line after a fit.

Nothing is measured for this. Every rank remembers its last 2000 rendezvous and when each rank arrived there. Waits
inside DDP's own exchange of gradients are no rendezvous and not seen here."""

from .picture import plot_timeline as plot_timeline
from .summary import straggler_summary as straggler_summary
from .table import timeline as timeline, waits_by_name as waits_by_name, waits_by_rank as waits_by_rank

__all__ = ['timeline', 'waits_by_name', 'waits_by_rank', 'plot_timeline', 'straggler_summary']
