"""The command `haav`, and `python -m haav`: `cli.main` in a process of its own. torchrun starts it this way."""

import atexit
import gc
import sys


def run() -> int:
    # The collector looks for cycles after every 700 new objects, and importing torch makes 170,000 that stay.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)  # a process that ends need not be searched for cycles once more
    from haav.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
