"""What memories learn: programs that train small models, and the tables made of their lines.

Each program is run from the repository's root as `python -m lab.ROOM.NAME`. study/ trains on text,
comparison/ on synthetic tasks; seeded_faults/ counts the faults that the library's tests catch.
Programs store lines of JSON in results/, from which `python -m lab.pages` writes the tables of
docs/measurements/. `python -m pytest lab/tests` tests them; the library's tests know none of this.
"""
