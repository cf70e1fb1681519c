"""What a box sends may come from a learner: parsing it must be safe, strict and quick."""

import json
import time

import pytest

from course.grade import reply

LINE = {"name": "a", "values": [1, 2.5, "word"], "tol": 1e-4, "part": 0}
GOOD = {"setup": "", "checks": {"f": {"shown": [LINE], "error": "", "seconds": 0.5}}}


def bent(**changes) -> bytes:
    """The good reply with other fields in its only line."""
    ran = {"shown": [{**LINE, **changes}], "error": "", "seconds": 0.5}
    return json.dumps({"setup": "", "checks": {"f": ran}}).encode()


def test_an_honest_reply_is_read_whole():
    ran = reply.checks(b"\n" + json.dumps(GOOD).encode(), ["f"])["f"]
    assert ran.shown == [LINE] and (ran.error, ran.seconds) == ("", 0.5)
    assert [type(token) for token in ran.shown[0]["values"]] == [int, float, str]


HOSTILE = {
    "empty": b"",
    "no JSON": b"passed",
    "two objects": json.dumps(GOOD).encode() * 2,
    "cut": json.dumps(GOOD).encode()[:-1],
    "deep lists": b"[" * 500_000,
    "deep objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "deep line": bent(values=[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]),
    "5,000 digits": bent(values=[0]).replace(b"[0]", b"[" + b"9" * 5_000 + b"]"),
    "1 MB of digits": b"9" * 1_000_000,
    "NaN": bent(values=[float("nan")]),
    "infinity": bent(tol=float("inf")),
    "huge float": bent(values=[0]).replace(b"[0]", b"[1e999]"),
    "lone surrogate": bent(name="\ud800"),
    "surrogate in a value": bent(values=["x\udfff"]),
    "surrogate as a key": b'{"setup": "", "checks": {"\\ud800": 1}}',
    "no UTF-8": b'{"setup": "\xff", "checks": {}}',
    "a key twice": b'{"setup": "", "setup": "", "checks": {}}',
    "an exercise twice": b'{"setup": "", "checks": {"f": {}, "f": {}}}',
    "a list": b"[]",
    "no checks": b'{"setup": ""}',
    "more keys": json.dumps({**GOOD, "passed": True}).encode(),
    "a bool for a number": bent(values=[True]),
    "null": bent(values=[None]),
    "a nested value": bent(values=[[1]]),
    "values no list": bent(values="1"),
    "tol a word": bent(tol="0"),
    "part a float": bent(part=0.0),
    "an extra field": bent(status="passed"),
    "error no word": b'{"setup": "", "checks": {"f": {"shown": [], "error": 0, "seconds": 0}}}',
    "no time": b'{"setup": "", "checks": {"f": {"shown": [], "error": ""}}}',
    "time no number": b'{"setup": "", "checks": {"f": {"shown": [], "error": "", "seconds": ""}}}',
    "exercise missing": b'{"setup": "", "checks": {}}',
    "another exercise": json.dumps(GOOD).replace('"f"', '"g"').encode(),
    "setup failed": b'{"setup": "boom", "checks": {}}',
    "an open string": b'"' + b'\\"' * 500_000,
    "many strings": b'""' * 500_000,
    "many lists": b"[" + b"[]," * 340_000 + b"[]]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_is_malformed_and_costs_no_time(name):
    start = time.process_time()
    with pytest.raises(reply.Malformed) as why:
        reply.checks(HOSTILE[name], ["f"])
    assert time.process_time() - start < 2
    assert len(str(why.value)) < 300
    str(why.value).encode("utf-8")
