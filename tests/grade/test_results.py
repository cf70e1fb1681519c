"""The folder of results: whole files, one writer, a seed that stays secret while it matters."""

import hashlib
import json
import os
import stat

import pytest

from course.errors import CourseError
from course.grade import results
from course.grade.grader import Outcome
from course.grade.submissions import Submission

WANTED = {"chapters": ["kv_cache"], "unsafe": False, "seconds": 120.0, "memory": 1}


def outcome(id: str, lost: bool = False, seconds: float = 1.0) -> Outcome:
    verdict = {"id": id, "points": 0 if lost else 3, "chapters": {}}
    timing = {"seconds": seconds, "boxes": []}
    return Outcome(Submission(id, None), verdict, timing, lost)  # type: ignore[arg-type]


def make(folder, resume=False, seed=None, **other):
    return results.opened(folder, resume, seed, WANTED | other)


def test_the_seed_is_secret_until_the_batch_is_closed(tmp_path):
    with make(tmp_path / "out") as kept:
        secret = tmp_path / "out" / ".seed"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert int(secret.read_text()) == kept.seed and kept.seed.bit_length() > 32
        told = json.loads((tmp_path / "out" / "batch.json").read_text())
        digest = hashlib.sha256(str(kept.seed).encode()).hexdigest()
        assert told["seed_sha256"] == digest and told["state"] == "open"
        for path in (tmp_path / "out").rglob("*"):
            if path.is_file() and path != secret:
                assert str(kept.seed) not in path.read_text()
        kept.close()
    told = json.loads((tmp_path / "out" / "batch.json").read_text())
    assert told["state"] == "closed" and told["seed"] == kept.seed and not secret.exists()
    with make(tmp_path / "out", resume=True) as again:
        assert again.closed and again.seed == kept.seed


def test_seeds_are_fresh_or_as_asked(tmp_path):
    seeds = set()
    for n in range(3):
        with make(tmp_path / f"{n}") as kept:
            seeds.add(kept.seed)
    assert len(seeds) == 3
    with make(tmp_path / "asked", seed=5) as kept:
        assert kept.seed == 5
    with make(tmp_path / "asked", resume=True) as kept:
        assert kept.seed == 5


@pytest.mark.parametrize("id", ["anna", "../../etc/passwd", "a" * 5000, "\udcff", "é", "=1+1", ""])
def test_any_id_has_its_own_file_in_the_folder(tmp_path, id):
    with make(tmp_path / "out") as kept:
        assert not kept.has(id)
        kept.add(outcome(id))
        found = kept.verdict(id)
        assert found and found["id"] == id and kept.timing(id)["seconds"] == 1.0
        assert kept.verdict_path(id).parent == tmp_path / "out" / "verdicts"
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_verdict_files_hold_no_times(tmp_path):
    names = []
    for n, seconds in enumerate((1.0, 2.0)):
        with make(tmp_path / f"{n}", seed=1) as kept:
            kept.add(outcome("a", seconds=seconds))
            names.append(kept.verdict_path("a").read_bytes())
    assert names[0] == names[1]


def test_a_damaged_verdict_is_none(tmp_path):
    with make(tmp_path / "out") as kept:
        kept.add(outcome("a"))
        path = kept.verdict_path("a")
        path.write_bytes(path.read_bytes()[:10])
        assert not kept.has("a")
        path.write_bytes(b"\xff")
        assert not kept.has("a")
        for text in ("[]", "{}", '{"id": "b", "chapters": {}}', "[" * 100_000):
            path.write_text(text)
            assert not kept.has("a")


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, '{"boxes": [{}]}', '{"boxes": 1}', "{}"]
)
def test_times_that_are_damaged_are_forgotten(tmp_path, text):
    with make(tmp_path / "out") as kept:
        kept.add(outcome("a"))
        (file,) = (tmp_path / "out" / "timing").iterdir()
        file.write_text(text)
        assert kept.timing("a") == {"seconds": 0, "boxes": []}


@pytest.mark.parametrize(
    "damage",
    [{"state": None}, {"state": "shut"}, {"chapters": 5}, {"chapters": [5]}, {"seed_sha256": None}],
)
def test_a_damaged_batch_is_not_continued(tmp_path, damage):
    with make(tmp_path / "out"):
        pass
    file = tmp_path / "out" / "batch.json"
    whole = json.loads(file.read_text()) | damage
    file.write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    with pytest.raises(CourseError, match="is damaged"), make(tmp_path / "out", True):
        pass
    with pytest.raises(CourseError, match="is damaged"):
        results.chapters(tmp_path / "out")


@pytest.mark.parametrize("closed", [False, True])
def test_a_batch_keeps_the_seed_that_it_was_begun_with(tmp_path, closed):
    with make(tmp_path / "out", seed=5) as kept:
        if closed:
            kept.close()
    if closed:
        file = tmp_path / "out" / "batch.json"
        file.write_text(file.read_text().replace('"seed": 5', '"seed": 6'))
    else:
        (tmp_path / "out" / ".seed").write_text("6")
    with pytest.raises(CourseError, match="not the one"), make(tmp_path / "out", True):
        pass


def test_nothing_is_replaced_behind_a_link(tmp_path):
    with make(tmp_path / "out"):
        pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "out" / "report").symlink_to(tmp_path / "mine")
    with pytest.raises(CourseError, match="report is a link"), make(tmp_path / "out", True):
        pass


def test_what_got_lost_is_provisional(tmp_path):
    with make(tmp_path / "out") as kept:
        kept.add(outcome("a", lost=True))
        assert not kept.has("a") and kept.lost("a")
        kept.add(outcome("a"))
        assert kept.has("a") and kept.lost("a") is None


def test_one_grader_at_a_time(tmp_path):
    with (
        make(tmp_path / "out"),
        pytest.raises(CourseError, match="another `course grade`"),
        make(tmp_path / "out", resume=True),
    ):
        pass
    with make(tmp_path / "out", resume=True):
        pass


def test_a_folder_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(CourseError, match="is not empty"), make(tmp_path / "mine"):
        pass
    with pytest.raises(CourseError, match="no batch to resume"), make(tmp_path / "mine", True):
        pass
    with make(tmp_path / "out"):
        pass
    with pytest.raises(CourseError, match="--resume"), make(tmp_path / "out"):
        pass
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(CourseError, match="cannot write"), make(file / "out"):
        pass


@pytest.mark.parametrize(
    "other", [{"chapters": ["serving"]}, {"unsafe": True}, {"seconds": 1.0}, {"memory": 2}]
)
def test_a_batch_is_continued_as_it_was_begun(tmp_path, other):
    with make(tmp_path / "out"):
        pass
    with (
        pytest.raises(CourseError, match=f"another {next(iter(other))}"),
        make(tmp_path / "out", resume=True, **other),
    ):
        pass


def test_a_batch_of_another_version_or_without_its_seed_is_not_continued(tmp_path, monkeypatch):
    with make(tmp_path / "out"):
        pass
    os.unlink(tmp_path / "out" / ".seed")
    with pytest.raises(CourseError, match="without its seed"), make(tmp_path / "out", True):
        pass
    monkeypatch.setattr(results, "code_hash", lambda: "another")
    with pytest.raises(CourseError, match="another course"), make(tmp_path / "out", True):
        pass
