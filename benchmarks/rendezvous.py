"""What a rendezvous costs: ours against what torch.distributed offers, on this machine's CPU over gloo.

    python benchmarks/rendezvous.py [--quick] [--ranks 2 4 8] [--json FILE] [--check]

All contenders take turns in the same processes: some calls of one, then some of the next, round after round. The table
gives medians per call and ratios. The targets that `--check` holds, as ratios of medians:"""

from __future__ import annotations
import argparse, json, os, socket, statistics, sys, time
from datetime import timedelta
from pathlib import Path

import torch, torch.distributed as dist, torch.multiprocessing as mp

import fastai_ddp_callbacks.distributed.collectives as ours

TARGETS = [  # ours, other, at most, at these world sizes
    ('barrier', 'dist.barrier', 1.7, None),
    ('agree', 'dist.barrier', 2.0, None),
    ('agree', 'all_gather_object', 1 / 3, [4]),
]


def contenders(rank, size):
    one, objects = torch.zeros(1), [None] * size

    def broadcast_object():
        o = [1.5]
        dist.broadcast_object_list(o)

    def gather_object():  # how a decision is often made: gather on rank 0, decide, tell everyone
        dist.gather_object(1.5, objects if rank == 0 else None)
        broadcast_object()

    return {
        'barrier': lambda: ours.barrier('b'),
        'agree': lambda: ours.agree(1.5 + rank, 'mean', 'a'),
        'broadcast': lambda: ours.broadcast([1.5], name='c'),
        'dist.barrier': dist.barrier,
        'monitored_barrier': dist.monitored_barrier,
        'all_reduce': lambda: dist.all_reduce(one),
        'broadcast_object_list': broadcast_object,
        'gather_object': gather_object,
        'all_gather_object': lambda: dist.all_gather_object(objects, 1.5),
    }


def worker(rank, size, port, rounds, calls, seconds, queue):
    torch.set_num_threads(1)
    dist.init_process_group(
        'gloo', init_method=f'tcp://127.0.0.1:{port}', rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    fs = contenders(rank, size)
    times = {k: [] for k in fs}
    end = time.monotonic() + seconds
    for _ in range(rounds):
        for name, f in fs.items():
            f()  # everyone is here
            start = time.perf_counter()
            for _ in range(calls):
                f()
            times[name].append((time.perf_counter() - start) / calls)
        if ours.agree(time.monotonic() > end, 'main', 'time is up'):
            break
    if rank == 0:
        queue.put(times)
    dist.barrier()
    dist.destroy_process_group()


def measure(size, rounds, calls, seconds):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    queue = mp.get_context('spawn').SimpleQueue()
    mp.spawn(worker, (size, port, rounds, calls, seconds, queue), nprocs=size)
    times = queue.get()
    return {k: statistics.median(v) for k, v in times.items()}, len(times['barrier'])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='\n'.join(f'  {a} at most {r:.2f} of {b}{f" at {w} ranks" if w else ""}' for a, b, r, w in TARGETS),
    )
    parser.add_argument(
        '--ranks',
        type=int,
        nargs='+',
        default=[2, 4, 8],
        help='world sizes to measure (16 and 32 work too, and take their time)',
    )
    parser.add_argument('--quick', action='store_true', help='end within 50 s on two cores')
    parser.add_argument('--json', type=Path, help='write the figures to this file')
    parser.add_argument('--check', action='store_true', help='exit with 1 if a target is missed')
    args = parser.parse_args()
    results, missed = {}, []
    for size in args.ranks:
        medians, rounds = measure(size, 200, 10, 6 if args.quick else 30)
        results[size] = medians
        print(
            f'\n{size} ranks, medians of {rounds} rounds of 10 calls{"":8}{"us":>8}{"of dist.barrier":>17}'
            f'{"ours: barrier, agree of it":>29}'
        )
        for name, t in medians.items():
            print(
                f'  {name:40}{t * 1e6:14.0f}{t / medians["dist.barrier"]:17.2f}{medians["barrier"] / t:18.2f}'
                f'{medians["agree"] / t:11.2f}',
                flush=True,
            )
        missed += [
            f'{size} ranks: {a} takes {medians[a] / medians[b]:.2f} of {b}, the target is {r:.2f}'
            for a, b, r, sizes in TARGETS
            if (sizes is None or size in sizes) and medians[a] > r * medians[b]
        ]
    if args.json:
        args.json.write_text(json.dumps(dict(seconds=results, torch=torch.__version__, cpus=os.cpu_count()), indent=1))
    for o in missed:
        print('missed:', o)
    if not missed:
        print('\nAll targets are met.')
    if args.check and missed:
        sys.exit(1)


if __name__ == '__main__':
    main()
