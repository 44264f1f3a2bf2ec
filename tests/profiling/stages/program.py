"""A command for tests that start commands: what it is told to do is its first argument."""

import os
import time


def main(arguments):
    """Say what it sees, wait if told to, and return the status that it is told."""
    print(os.environ.get("GREETING"), os.getsid(0) == os.getpid(), *arguments)
    if arguments[0] == "wait":
        time.sleep(60)
    return int(arguments[-1])
