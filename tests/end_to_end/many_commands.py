"""Runs many commands, each in a process of its own, and imports what they need once.

Reads a JSON list of lists of arguments from standard input; writes one of [status, output, errors].
What happens to a command is the same as to a process that the launcher started.
"""

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    from fedcodist.run import launch

    os.environ |= {launch.RANK: "0", launch.COUNT: "1"}
    import sklearn.datasets

    import fedcodist.commands.run
    import fedcodist.config.experiment
    import fedcodist.run.experiment
    import fedcodist.run.export

    command = fedcodist.commands.run.main
    del sklearn, fedcodist  # they only had to be imported
    # jax warns of forks; no backend has been started here, nor any thread.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    results = [run(command, arguments) for arguments in json.load(sys.stdin)]
    json.dump(results, sys.stdout)


def run(command, arguments: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = ["main", *arguments]
            try:
                status = command(sys.argv)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
        return (os.waitstatus_to_exitcode(status), *texts)


if __name__ == "__main__":
    main()
