"""`python -m experiments.main --config FILE --workdir FOLDER`, the same as `fedcodist.commands.run`."""

from fedcodist.commands.run import run_and_exit

if __name__ == "__main__":
    run_and_exit()
