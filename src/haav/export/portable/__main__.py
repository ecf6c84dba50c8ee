"""python -m haav.export.portable EXPORTED photo …: a line of JSON per photo; exit code 1 where one cannot be read"""

from __future__ import annotations

import json
import sys

from haav.errors import HaavError, ImageError, printable
from haav.export.portable import PortableCaptioner


def main(words: list[str]) -> int:
    if len(words) < 2 or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    failed = 0
    try:
        captioner = PortableCaptioner(words[0])
        for photo in words[1:]:
            try:
                result = captioner.caption(photo).to_json()
            except ImageError as error:
                failed, result = 1, {"error": str(error)}
            print(json.dumps({"image": photo, **result}), flush=True)
    except HaavError as error:
        print(printable(str(error), lines=True), file=sys.stderr)
        return 2
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
