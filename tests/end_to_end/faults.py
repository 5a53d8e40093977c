"""The command, with one fault: python faults.py WHERE:ROUND:ACTION MARKER [arguments of the command]

WHERE is `metrics` (they are written, their checkpoint is not), `checkpoint` (half of it is written),
`training` (between two evaluations) or `summary` (half of it is written). ACTION is `hang`, `abort`
or `full` (a full disk). The fault happens once: it makes the file MARKER, and not where that exists.
"""

import errno
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> int:
    fault, marker, *arguments = sys.argv[1:]
    sys.argv = [sys.argv[0], *arguments]
    from fedcodist.commands import run as command
    from fedcodist.run import launch

    if launch.is_child():
        if not Path(marker).exists():
            inject(*fault.split(":"), Path(marker))
    else:
        supervise = launch.supervise

        def supervise_faults(program, *others, **options):
            start = [sys.executable, __file__, fault, marker]
            return supervise([*start, *program[3:]], *others, **options)

        launch.supervise = supervise_faults
    return command.main(sys.argv)


def inject(where: str, round_: str, action: str, marker: Path) -> None:
    from fedcodist.core import files
    from fedcodist.run import run_folder, training_loop

    def act():
        marker.touch()
        if action == "abort":
            os.abort()
        if action == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(1000)

    append, check, write = (
        run_folder.RunFolder.append_metrics,
        training_loop.check_finite,
        files.write_all,
    )

    def append_metrics(self, records):
        length = append(self, records)
        if any(record["round"] == int(round_) for record in records):
            act()
        return length

    def check_finite(first, *others):
        check(first, *others)
        if first >= int(round_):
            act()

    def write_all(file, content):
        name = {"checkpoint": f"round_{int(round_):08d}", "summary": "summary.json"}[where]
        if name in file.name:
            write(file, content[: len(content) // 2])
            file.flush()
            act()
        write(file, content)

    if where == "metrics":
        run_folder.RunFolder.append_metrics = append_metrics
    elif where == "training":
        training_loop.check_finite = check_finite
    else:
        files.write_all = write_all


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
