"""The processes of a study: one starts the workers, and they run trials until it is complete."""

import functools
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import flags

from fedcodist.config import command_line
from fedcodist.core import child_processes
from fedcodist.run import compilation_cache, launch
from fedcodist.tuning import search_space

# File descriptor on which the first worker reports that the study is open.
_READY = "FEDCODIST_TUNE_READY"


def supervise(program: Sequence[str], processes: int) -> int:
    """Runs the workers to their end; returns 0, or the status of a failure.

    The first worker is started alone, so that a mistake is reported once. Workers do not depend on each
    other: where one dies, the others take over its trial.
    """
    workers: list[subprocess.Popen] = []
    try:
        is_ready, ready = os.pipe()
        workers.append(_start(program, 0, processes, ready))
        os.close(ready)
        if os.read(is_ready, 1):
            workers += [_start(program, rank, processes) for rank in range(1, processes)]
        os.close(is_ready)
        statuses = [worker.wait() for worker in workers]
    finally:
        child_processes.stop(workers, seconds=0)
    for rank, status in enumerate(statuses):
        if status < 0:
            name = signal.Signals(-status).name
            print(f"worker {rank} was stopped by {name}: the same command goes on.", flush=True)
    return next((1 if status < 0 else status for status in statuses if status), 0)


def _start(
    program: Sequence[str], rank: int, processes: int, ready: int | None = None
) -> subprocess.Popen:
    environment = os.environ | {launch.RANK: str(rank), launch.COUNT: str(processes)}
    if ready is not None:
        environment[_READY] = str(ready)
    return child_processes.start(
        program,
        env=environment,
        # Nothing is written to this pipe. A worker notices by its end that this process has ended.
        stdin=subprocess.PIPE,
        pass_fds=() if ready is None else (ready,),
    )


def work(values: flags.FlagValues) -> int:
    """Does one worker's part of the study; returns the exit status.

    Args:
      values: the flags of `fedcodist tune`.
    """
    rank, count = int(os.environ[launch.RANK]), int(os.environ[launch.COUNT])
    _end_with_the_supervisor()
    launch.take_cores(rank, count)
    compilation_cache.cache_compilations()
    # These import JAX, which looks at the cores when it starts.
    from fedcodist.config.data_prepared import data_checksums
    from fedcodist.config.referenced_code import described_references
    from fedcodist.run.identity import identity_of
    from fedcodist.tuning import at_once, held_out, trials
    from fedcodist.tuning import study as studies

    command_line.show_warnings(rank == 0)
    config = values.config
    try:
        if values.output:
            Path(values.output).parent.mkdir(parents=True, exist_ok=True)
        experiment, hyper_of = held_out.held_out_experiment(config)
        space = search_space.search_space(config)
        # The first worker has checked a space of the config's own for all.
        if rank == 0 or search_space.is_default(config):
            space = held_out.trial_space(config, hyper_of)
        plan = studies.make_plan(
            config,
            space,
            storage=Path(values.storage),
            name=values.study,
            trials=values.trials,
            seed=values.seed,
            pruner=values.pruner,
            command=shlex.join(["python", "-m", "fedcodist.tuning.tune", *sys.argv[1:]]),
            determined_by={
                "data": identity_of(experiment, has_config=True).content["data"],
                "code": described_references(config),
                "prepared": data_checksums(config.data),
            },
        )
        programs = at_once.programs_at_once(experiment) if values.at_once > 1 else None
        worker = studies.Worker(plan.storage)
        study = studies.open_study(plan, worker)
    except Exception as error:
        if not command_line.is_mistake(error) and not isinstance(error, studies.ERRORS):
            raise
        return command_line.refuse(error)
    if rank == 0:
        _print_notes(search_space.search_space(config), space, plan.first)
        os.write(int(os.environ[_READY]), b"1")
    run = trials.run_trials
    if programs is not None:
        run = functools.partial(trials.run_trials_at_once, programs, values.at_once)
    counts, compilations = run(config, experiment, hyper_of, plan, study, worker)
    print(
        f"worker {rank}: trials: {counts.total()} "
        f"(finished {counts['finished']}, pruned {counts['pruned']}); "
        f"compiled training programs: {compilations}",
        flush=True,
    )
    return 0


def _print_notes(
    wanted: search_space.Space, space: search_space.Space, first: Mapping[str, float]
) -> None:
    """Says which dimensions are not searched, and which have no value of the config's."""
    if idle := sorted(set(wanted) - set(space)):
        print(f"not searched, as they change nothing here: {', '.join(idle)}")
    if missing := sorted(set(space) - set(first)):
        print(
            "drawn in the first trial too, as the config's lie outside or differ between pools: "
            f"{', '.join(missing)}"
        )


def _end_with_the_supervisor() -> None:
    def wait() -> None:
        # Reads from the descriptor: sys.stdin's lock would still be held while the interpreter ends.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
