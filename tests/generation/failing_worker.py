"""``mm.generate`` on several ranks; the last rank fails while the third token is chosen."""

import os
import sys

from mm.device.device import Device

Device.pick("cpu")

from mm.generate import main  # noqa: E402
from mm.generation import session  # noqa: E402
from mm.generation.decode import Answerer  # noqa: E402


class Failing(Answerer):
    def _take(self, answers, token_ids):
        super()._take(answers, token_ids)
        if len(answers[0].token_ids) == 2 and os.environ["RANK"] == "1":
            raise RuntimeError("no third token")


if __name__ == "__main__":
    session.Answerer = Failing
    sys.exit(main(sys.argv[1:]))
