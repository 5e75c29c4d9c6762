"""A program that is killed with SIGKILL as soon as enough answers are on disk: PROGRAM NUM_ANSWERS ARGUMENT...

A kill from another process might come too late on a busy machine, after all answers.
"""

import os
import runpy
import signal
import sys

from mm.generation.answers import AnswerFile

if __name__ == "__main__":
    program, num_answers = sys.argv[1], int(sys.argv[2])
    add = AnswerFile.add

    def add_or_die(self, answers):
        add(self, answers)
        if self.path.read_bytes().count(b"\n") >= num_answers:
            os.kill(os.getpid(), signal.SIGKILL)

    AnswerFile.add = add_or_die
    sys.argv = [program, *sys.argv[3:]]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
