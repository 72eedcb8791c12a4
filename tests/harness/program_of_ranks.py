"""A program that an agent's ranks run: leaves with the number that it is given."""

import os
import time

from contract.errors import UserError


def main(arguments: list[str]) -> int:
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
    if arguments == ["sleep"]:
        print("asleep", flush=True)
        time.sleep(60)
    if not arguments[0].isdigit():
        raise UserError(f"{arguments[0]}: give one")
    return int(arguments[0])
