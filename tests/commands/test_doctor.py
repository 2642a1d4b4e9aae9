"The doctor: what it says of ranks that are in order, and of ranks of which one is not."

import contextlib, io, json, os, re, signal, socket, subprocess, sys, threading, time
from types import SimpleNamespace

import pytest

from fastai_ddp_callbacks import cli
from fastai_ddp_callbacks.commands import doctor, facts as own
from fastai_ddp_callbacks.commands.diagnosis import judge
from fastai_ddp_callbacks.commands.findings import Finding
from fastai_ddp_callbacks.commands.launcher_variables import look_at_variables
from ranks import run, values

CHECKS = ['launcher', 'ranks', 'backend', 'devices', 'gloo', 'clock', 'disk', 'space', 'versions']


def ask(*args):
    "Exit status and report of the command in this process; None where another rank reports."
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = cli.main(['doctor', '--json', *map(str, args)])
    return status, json.loads(out.getvalue()) if out.getvalue() else None


def asked(folder, n, *args, before=lambda rank: None, **kwargs):
    "What each of n ranks says, after `before` has made it different from the others."

    def scenario():
        before(int(os.environ['RANK']))
        return ask('--folder', folder, '--timeout', 20, *args)

    return values(run(scenario, n, group=False, **kwargs))


def verdicts(report):
    return [(o['check'], o['verdict']) for o in report['checks']]


def of(report, check):
    "The one line of a check: (verdict, text)."
    ((verdict, text),) = [(o['verdict'], o['text']) for o in report['checks'] if o['check'] == check]
    return verdict, text


def bad(report):
    return [o['check'] for o in report['checks'] if o['verdict'] != 'ok']


# -- all is well


def test_three_ranks_in_order_are_told_so_once(tmp_path):
    (status, report), *others = asked(tmp_path, 3)
    assert status == 0 and others == [(0, None)] * 2
    assert verdicts(report) == [(o, 'ok') for o in CHECKS] and len(report['ranks']) == 3
    assert of(report, 'ranks')[1] == '3 ranks on 1 host' and 'shared by all ranks' in of(report, 'disk')[1]
    assert not list(tmp_path.iterdir())


def test_a_process_alone_is_in_order_too(tmp_path):
    ((status, report),) = asked(
        tmp_path,
        1,
        env=lambda r: (
            dict.fromkeys(['WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT']) | dict(RANK=0)
        ),
    )
    assert status == 0 and verdicts(report)[1:] == [(o, 'ok') for o in CHECKS[1:]]
    assert of(report, 'launcher')[0] == 'note' and 'RANK=0' in of(report, 'launcher')[1]
    assert not list(tmp_path.iterdir())


def test_under_torchrun_the_report_is_printed_once_for_people(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            '-m',
            'torch.distributed.run',
            '--standalone',
            '--nproc_per_node=2',
            '-m',
            'fastai_ddp_callbacks.cli',
            'doctor',
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r'^rank (\d) of 2: ', done.stdout, re.M) == ['0', '1']
    assert re.findall(r'^(?:ok|note|problem) +(\w+) ', done.stdout, re.M) == CHECKS
    assert done.stdout.endswith('Verdict: no problems, no notes.\n') and not list(tmp_path.iterdir())


# -- a rank is not there


def test_a_rank_that_does_not_come_is_named_by_all_others(tmp_path):
    def scenario():
        if os.environ['RANK'] != '2':
            return ask('--folder', tmp_path, '--timeout', 2)

    (status, report), other, _ = values(run(scenario, 3, group=False))
    assert status == 1 and other == (1, None)
    assert (
        of(report, 'ranks') == ('problem', 'rank 2 did not answer within 2 s, or left.')
        and of(report, 'gloo')[0] == 'note'
    )


def test_variables_of_a_group_left_over_in_a_shell_end_in_a_named_rank_and_not_in_a_hang(tmp_path):
    ((status, report),) = asked(tmp_path, 1, '--timeout', 1, env=lambda r: dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2))
    assert status == 1 and of(report, 'ranks')[1] == 'rank 1 did not answer within 1 s, or left.'
    assert any('unset them' in o['advice'] for o in report['checks'])


def test_a_rank_that_cannot_reach_the_store_says_so_itself(tmp_path):
    (a, first), (b, second) = asked(tmp_path, 2, '--timeout', 2, env=lambda r: dict(MASTER_PORT=1) if r else {})
    assert a == b == 1 and of(first, 'ranks')[1] == 'rank 1 did not answer within 2 s, or left.'
    assert of(second, 'ranks')[1].startswith('The store at 127.0.0.1:1 cannot be reached') and list(
        second['ranks']
    ) == ['1']


@pytest.fixture
def silent():
    "A port at which something answers that says nothing."
    with socket.create_server(('127.0.0.1', 0)) as s:
        yield s.getsockname()[1]


def test_something_else_at_the_port_is_a_problem_once_the_time_is_over(tmp_path, silent):
    ((status, report),) = asked(
        tmp_path, 1, '--timeout', 1, env=lambda r: dict(RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=silent)
    )
    assert status == 1 and of(report, 'ranks') == (
        'problem',
        f'Something else answers at 127.0.0.1:{silent}: no store of torch answered within 1 s.',
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('number, status', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_waits_for_the_store_can_be_told_to_end(tmp_path, silent, number, status):
    def scenario():
        threading.Timer(1, os.kill, (os.getpid(), number)).start()
        sys.exit(cli.main(['doctor', '--folder', str(tmp_path), '--timeout', '600']))

    (result,) = run(
        scenario, 1, group=False, env=lambda r: dict(RANK=1, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, MASTER_PORT=silent)
    )
    assert result.exitcode == status and not result.hung and not list(tmp_path.iterdir())


def test_when_rank_0_dies_with_the_store_the_others_report(tmp_path):
    def scenario():
        if os.environ['RANK'] == '0':
            own._look_for = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        return ask('--folder', tmp_path, '--timeout', 10)

    dead, *others = run(scenario, 3, group=False)
    assert dead.exitcode == -signal.SIGKILL
    for status, report in values(others):
        assert status == 1 and of(report, 'ranks')[0] == 'problem'


def test_two_processes_of_one_rank_are_told_apart(tmp_path):
    first, *both = asked(tmp_path, 3, '--timeout', 2, env=lambda r: dict(RANK=1) if r else {})
    assert first[0] == 1 and [(o['verdict'], o['text']) for o in first[1]['checks'] if o['check'] == 'ranks'] == [
        ('problem', 'Several processes take themselves for rank 1.'),
        ('problem', 'rank 2 did not answer within 2 s, or left.'),
    ]
    assert [o for o, _ in both] == [1, 1]
    ((second,),) = [[report for _, report in both if report]]
    assert of(second, 'ranks')[1] == 'Several processes take themselves for rank 1.'


# -- the launcher's variables

GROUP = {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'alpha', 'MASTER_PORT': '1'}


def test_world_sizes_that_differ_are_a_problem(tmp_path):
    (status, report), _ = asked(tmp_path, 2, '--timeout', 2, env=lambda r: dict(WORLD_SIZE=3) if r else {})
    assert status == 1 and 'rank 0: 2; rank 1: 3' in of(report, 'launcher')[1] and of(report, 'gloo')[0] == 'note'


def test_equal_local_ranks_on_one_host_are_a_problem(tmp_path):
    (status, report), _ = asked(tmp_path, 2, env=lambda r: dict(LOCAL_RANK=0))
    assert status == 1 and bad(report) == ['launcher'] and of(report, 'launcher')[1].endswith('have LOCAL_RANK 0, 0.')


@pytest.mark.parametrize(
    'env, size, verdict, words',
    [
        ({}, 1, 'ok', 'alone'),
        ({'RANK': '0'}, 1, 'note', 'left over'),
        ({'RANK': '1'}, 1, 'problem', 'no WORLD_SIZE, MASTER_ADDR, MASTER_PORT'),
        ({'RANK': '0', 'WORLD_SIZE': '4'}, 1, 'problem', 'train alone'),
        ({'WORLD_SIZE': 'two'}, 1, 'problem', "WORLD_SIZE='two' is not a whole number"),
        ({'MASTER_PORT': ''}, 1, 'problem', "MASTER_PORT='' is not"),
        ({**GROUP, 'MASTER_PORT': '99999'}, 1, 'problem', 'MASTER_PORT=99999 is no port'),
        ({**GROUP, 'MASTER_PORT': '0'}, 1, 'problem', 'MASTER_PORT=0 is no port'),
        ({**GROUP, 'MASTER_ADDR': ''}, 1, 'problem', 'MASTER_ADDR is empty'),
        ({'MASTER_ADDR': ' '}, 1, 'problem', 'MASTER_ADDR is empty'),
        ({'RANK': '2', 'WORLD_SIZE': '2'}, 1, 'problem', 'RANK=2 does not go with WORLD_SIZE=2'),
        (
            {'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '1'},
            1,
            'problem',
            'LOCAL_RANK=1 does not go with LOCAL_WORLD_SIZE=1',
        ),
        ({'SLURM_NTASKS': '4'}, 1, 'note', 'SLURM_NTASKS=4'),
        ({'SLURM_NTASKS': '1'}, 1, 'ok', 'alone'),
        (GROUP, 2, 'ok', 'go together'),
        ({**GROUP, 'MASTER_PORT': '65535'}, 2, 'ok', 'go together'),
    ],
)
def test_variables_are_taken_at_their_word_or_refused_with_the_reason(env, size, verdict, words):
    rank, n, (said, text, advice) = look_at_variables(env)
    assert (n, said) == (size, verdict) and words in text and rank < n and bool(advice) == (verdict != 'ok')


# -- network, clocks, disks, versions


def test_a_rank_that_gloo_cannot_use_is_named_with_the_cause(tmp_path):
    (status, report), _ = asked(
        tmp_path, 2, '--timeout', 3, env=lambda r: dict(GLOO_SOCKET_IFNAME='nowhere0') if r else {}
    )
    assert status == 1 and bad(report) == ['gloo']
    assert of(report, 'gloo')[0] == 'problem' and re.search(r'rank 1: .*nowhere0', of(report, 'gloo')[1])


@pytest.mark.parametrize('seconds, verdict', [(0.5, 'ok'), (20, 'note'), (-100, 'problem')])
def test_a_clock_that_is_off_is_told_by_rank(tmp_path, seconds, verdict):
    def before(rank):
        if rank == 1:
            own.time = SimpleNamespace(time=lambda: time.time() + seconds, monotonic=time.monotonic, sleep=time.sleep)

    (status, report), _ = asked(tmp_path, 2, before=before)
    assert of(report, 'clock')[0] == verdict and status == (verdict == 'problem')
    if verdict != 'ok':
        assert f'The clock of rank {int(seconds > 0)} is {abs(seconds)}.' in of(report, 'clock')[1]


def test_separate_disks_are_a_note_that_says_whose_files_are_where(tmp_path):
    folders = [tmp_path / 'a', tmp_path / 'b', tmp_path / 'a']
    for o in folders:
        o.mkdir(exist_ok=True)

    def scenario():
        return ask('--folder', folders[int(os.environ['RANK'])])

    (status, report), *_ = values(run(scenario, 3, group=False))
    assert status == 0 and bad(report) == ['disk']
    assert of(report, 'disk') == ('note', 'Separate disks: ranks 0, 2: files of ranks 0, 2; rank 1: files of rank 1')
    assert not list(tmp_path.rglob('.*'))


def test_a_disk_that_shows_new_files_late_is_a_note(tmp_path):
    def before(rank):
        begin, exists = time.monotonic(), os.path.exists
        if rank:
            own.os = SimpleNamespace(
                **{
                    **vars(os),
                    'path': SimpleNamespace(
                        **{**vars(os.path), 'exists': lambda o: time.monotonic() > begin + 1.5 and exists(o)}
                    ),
                }
            )

    (status, report), _ = asked(tmp_path, 2, before=before)
    assert (
        status == 0
        and bad(report) == ['disk']
        and of(report, 'disk')[1].startswith('A shared disk, which shows new files after')
    )


def test_a_folder_that_one_rank_does_not_have_is_a_problem(tmp_path):
    def scenario():
        return ask('--folder', tmp_path / ('gone' if os.environ['RANK'] == '1' else ''))

    (status, report), _ = values(run(scenario, 2, group=False))
    assert status == 1 and of(report, 'disk') == (
        'problem',
        f'No file can be written. rank 1: {tmp_path / "gone"}: No such file or directory',
    )


def test_versions_that_differ_are_a_problem_by_rank(tmp_path):
    def before(rank):
        if rank:
            own._version = lambda name: '1.0' if name == 'torch' else None

    (status, report), _ = asked(tmp_path, 2, before=before)
    lines = [o['text'] for o in report['checks'] if o['check'] == 'versions']
    assert (
        status == 1
        and lines[0].startswith('torch differs. rank 0: ')
        and lines[0].endswith('; rank 1: 1.0')
        and 'rank 1: missing' in lines[1]
    )


def test_whoever_is_terminated_leaves_no_file_behind(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]  # free again
    env = {**os.environ, 'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    process = subprocess.Popen(
        [sys.executable, '-m', 'fastai_ddp_callbacks.cli', 'doctor', '--folder', str(tmp_path), '--timeout', '120'],
        env=env,
    )
    while not list(tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143 and not list(tmp_path.iterdir())


# -- the verdicts that need machines which are not here


def facts(**by_name):
    "Facts of ranks on one host; each value is a list with one item per rank."
    base = dict(
        size=2,
        launcher=('ok', '', ''),
        host='alpha',
        machine='alpha',
        gloo=True,
        nccl=True,
        gpus=0,
        visible=None,
        driver=False,
        free=1e12,
        disk_error=None,
        sees=[0, 1],
        after=0,
        met=dict(seconds=1, trip=0.001, ahead=[0, 0]),
        versions=dict(torch='2', fastai='2'),
    )
    return {
        r: {**base, 'rank': r, 'env': {'LOCAL_RANK': str(r)}, **{k: v[r] for k, v in by_name.items()}} for r in range(2)
    }


def judged(check, **by_name):
    ((finding,),) = [[o for o in judge(facts(**by_name), 2) if o.check == check]]
    return finding.verdict, finding.text


def test_ranks_that_share_a_gpu_are_a_problem():
    assert judged('devices', gpus=[1, 1]) == ('problem', 'A GPU for several ranks. ranks 0, 1: GPU 0')
    assert judged('devices', gpus=[1, 1], visible=['3', '3'])[0] == 'problem'


def test_ranks_with_a_gpu_each_are_in_order_however_it_is_given_to_them():
    assert judged('devices', gpus=[2, 2]) == ('ok', 'rank 0: GPU 0; rank 1: GPU 1')
    assert judged('devices', gpus=[1, 1], visible=['4', '5']) == ('ok', 'rank 0: GPU 4; rank 1: GPU 5')
    assert judged('devices', gpus=[1, 1], machine=['alpha', 'beta'])[0] == 'ok'


def test_a_gpu_is_the_same_however_it_is_written():
    assert (
        judged('devices', gpus=[2, 2], visible=['0, 1', '1,0'], env=[{'LOCAL_RANK': '1'}, {'LOCAL_RANK': '0'}])[0]
        == 'problem'
    )
    assert judged('devices', gpus=[2, 2], visible=['0, 1', '0,1'], env=[{'LOCAL_RANK': '1'}] * 2) == (
        'problem',
        'A GPU for several ranks. ranks 0, 1: GPU 1',
    )


@pytest.mark.parametrize('local', ['x', '', '-1'])
def test_a_local_rank_that_is_no_number_does_not_keep_the_doctor_from_judging(local):
    assert judged('devices', gpus=[2, 2], env=[{'LOCAL_RANK': local}, {}]) == ('ok', 'rank 0: GPU 0; rank 1: GPU 1')


def test_a_rank_without_a_gpu_among_others_is_a_problem():
    assert judged('devices', gpus=[2, 0]) == ('problem', 'rank 0 would train on GPUs, the other ranks on the CPU.')


def test_a_gpu_that_torch_cannot_use_is_a_note():
    assert judged('devices', driver=[True, True]) == ('note', 'ranks 0, 1 cannot use the GPU of this host.')


def test_gpus_that_are_hidden_by_a_number_that_does_not_exist_are_a_problem():
    assert judged('devices', driver=[True, True], visible=['7', '7']) == (
        'problem',
        'Every GPU of the host is hidden. ranks 0, 1: CUDA_VISIBLE_DEVICES=7',
    )
    assert judged('devices', driver=[True, True], visible=['7', ''])[1].endswith('rank 0: CUDA_VISIBLE_DEVICES=7')
    assert judged('devices', visible=['7', '7'])[0] == 'ok'  # there is none to hide
    assert judged('devices', driver=[True, True], visible=['', '-1']) == ('ok', 'no GPU: training on the CPU')


def test_a_missing_backend_is_a_problem_where_it_is_needed():
    assert judged('backend', nccl=[False, False]) == ('ok', 'gloo; no NCCL, which only GPUs need')
    assert judged('backend', nccl=[True, False], gpus=[2, 2]) == ('problem', 'torch has no NCCL on rank 1, with GPUs.')
    assert judged('backend', gloo=[True, False]) == ('problem', 'torch has no gloo on rank 1: ranks cannot meet.')


def test_little_space_is_a_note_and_hardly_any_a_problem():
    assert judged('space', free=[5e8, 1e12]) == ('note', '500.0 MB free for rank 0.')
    assert judged('space', free=[1e12, 5e6]) == ('problem', '5.0 MB free for rank 1.')


def test_every_verdict_but_ok_comes_with_what_to_do():
    spoilt = facts(
        gloo=[True, False],
        gpus=[1, 1],
        free=[1, 1],
        sees=[[0], [1]],
        folder=['.', '.'],
        met=[dict(error='x')] * 2,
        disk_error=[None, 'full'],
        versions=[dict(torch='1', fastai=None)] * 2,
    )
    for o in (*judge(spoilt, 3, connection_error='gone'), *judge(facts(), 3, [2])):
        assert (o.verdict == 'ok') != bool(o.advice)
    assert {o.check for o in judge(spoilt, 3)} == set(CHECKS)


# -- the command line


@pytest.mark.parametrize('args', [['--timeout', '0'], ['--timeout', 'soon'], ['--nonsense']])
def test_wrong_usage_is_refused_with_status_2(args, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(['doctor', *args])
    assert e.value.code == 2 and 'usage' in capsys.readouterr().err


def test_a_name_from_another_host_cannot_steer_the_terminal(capsys):
    doctor._report({0: dict(own.own_facts('.'), host='a\x1b[2Jb')}, [Finding('ok', 'ranks', 'x\ny')], 0, False)
    out = capsys.readouterr().out
    assert '\x1b' not in out and r'x\ny' in out
