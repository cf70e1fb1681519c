"""What learners hand in is read as data: the right file, whole, or a problem in one line."""

import io
import json
import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest

from course.catalog import ROOT
from course.errors import CourseError
from course.grade import submissions
from course.grade.reader import Reader
from tests.grade.classes import code, members, school

SCHOOL = school()
SLUG, KEY = "kv_cache", "kv_bytes_per_token"
GOOD = json.dumps(SCHOOL.notebook(SCHOOL.ours)).encode()
STUBS = json.dumps(SCHOOL.notebook({})).encode()
IN_PART = f"notebooks/foundations/{SLUG}.ipynb"


def put(root: Path, name: str, data: bytes) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def chapter(path: Path) -> dict:
    said = submissions.read(path, [SLUG])
    assert said["problem"] == "", said["problem"]
    return said["chapters"][SLUG]


def problem(path: Path) -> str:
    said = submissions.read(path, [SLUG])
    return said["problem"] or said["chapters"][SLUG]["problem"]


def tried(said: dict) -> set[str]:
    return {key for key, answer in said["answers"].items() if answer["tried"]}


@pytest.mark.parametrize(
    "name", [IN_PART, f"work/{SLUG}.ipynb", f"{SLUG}.ipynb", f"deep/{IN_PART}"]
)
def test_places_in_a_folder_and_in_a_zip(tmp_path, name):
    put(tmp_path / "alice", name, GOOD)
    packed = put(tmp_path, "alice.zip", members((name, GOOD)))
    for path in (tmp_path / "alice", packed):
        said = chapter(path)
        assert tried(said) == set(SCHOOL.record.keys)
        assert said["answers"][KEY]["problem"] == ""
        assert said["answers"][KEY]["source"].endswith(SCHOOL.ours[KEY])


def test_a_lone_notebook_is_the_chapter_that_it_begins(tmp_path):
    assert tried(chapter(put(tmp_path, "homework 3.ipynb", GOOD))) == set(SCHOOL.record.keys)
    text = SCHOOL.chapter.md.read_bytes()
    assert tried(chapter(put(tmp_path, "mine.md", text))) == set()
    other = json.dumps({"cells": [code("print(1)")], "metadata": {}, "nbformat": 4}).encode()
    assert "no chapter of this course" in problem(put(tmp_path, "other.ipynb", other))


def test_the_copy_that_holds_the_work_counts(tmp_path):
    put(tmp_path / "a", IN_PART, GOOD)
    put(tmp_path / "a", f"work/{SLUG}.ipynb", STUBS)
    put(tmp_path / "a", IN_PART.replace(".ipynb", ".md"), SCHOOL.chapter.md.read_bytes())
    assert chapter(tmp_path / "a")["file"] == IN_PART
    half = json.dumps(SCHOOL.notebook({KEY: SCHOOL.second[KEY]})).encode()
    put(tmp_path / "a", f"work/{SLUG}.ipynb", half)
    assert "hold different answers" in problem(tmp_path / "a")
    put(tmp_path / "a", f"work/{SLUG}.ipynb", GOOD)
    assert chapter(tmp_path / "a")["problem"] == ""


def test_a_chapter_that_is_not_there_is_no_problem(tmp_path):
    put(tmp_path / "a", "work/notes.txt", b"x")
    assert chapter(tmp_path / "a") == {"file": "", "problem": "", "answers": {}}


def test_tags_line_ends_and_saved_shapes_do_not_matter(tmp_path):
    raw = SCHOOL.notebook(SCHOOL.ours)
    for cell in raw["cells"]:
        cell["source"] = cell["source"].replace("\n", "\r\n").splitlines(keepends=True)
        cell["metadata"] = {"id": "x"}
    said = chapter(put(tmp_path, "a.ipynb", b"\xef\xbb\xbf" + json.dumps(raw).encode()))
    assert tried(said) == set(SCHOOL.record.keys)
    for cell in raw["cells"]:  # the marker line may be lost as well, then the tag decides
        first = "".join(cell["source"]).split("\r\n")[0]
        if first.startswith("# answer: "):
            cell["source"] = cell["source"][1:]
            cell["metadata"] = {"tags": [f"answer-{first.removeprefix('# answer: ')}", 3]}
    said = chapter(put(tmp_path, "b.ipynb", json.dumps(raw).encode()))
    assert tried(said) == set(SCHOOL.record.keys)


def test_two_different_cells_for_one_answer_are_refused_two_equal_ones_are_not(tmp_path):
    raw = SCHOOL.notebook(SCHOOL.ours)
    raw["cells"].append(code(f"# answer: {KEY}\n\n{SCHOOL.ours[KEY]}  # again"))
    assert chapter(put(tmp_path, "a.ipynb", json.dumps(raw).encode()))["answers"][KEY][
        "problem"
    ] == ("")
    raw["cells"].append(code(f"# answer: {KEY}\n{SCHOOL.second[KEY]}"))
    said = chapter(put(tmp_path, "b.ipynb", json.dumps(raw).encode()))["answers"]
    assert "two different cells" in said[KEY]["problem"]
    assert said["attend"]["problem"] == ""


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "not a notebook"),
        (b"\xff\xfe\x00", "not a notebook"),
        (b"[" * 500_000, "not a notebook"),
        (b"[]", "no list of cells"),
        (b'{"cells": 3}', "no list of cells"),
        (b'{"cells": [1]}', "no list of cells"),
        (b'{"worksheets": []}', "format 3"),
        (json.dumps({"cells": [code("x")] * 2001}).encode(), "2,001 cells"),
        (b'{"cells": [], "x": ' + b"9" * 5000 + b"}", "not a notebook"),
        (b" " * ((8 << 20) + 1), "too large"),
    ],
)
def test_what_is_no_notebook(tmp_path, data, word):
    put(tmp_path / "a", IN_PART, data)
    assert word in problem(tmp_path / "a")
    assert word in problem(put(tmp_path, "a.zip", members((IN_PART, data))))


@pytest.mark.parametrize(
    "cell",
    [
        {"cell_type": 7, "source": {"a": 1}, "metadata": [], "outputs": "x"},
        {"cell_type": "code", "source": [1, None, "x"], "metadata": {"tags": {"a": 1}}},
        {"cell_type": "code", "source": "# answer: attend\n\x00 '\ud800"},
        {"cell_type": "code", "source": "# answer: attend\n" + "(" * 5000},
        {"cell_type": "code", "source": "# answer: attend\nx = " + "-" * 20_000 + "1"},
        {"cell_type": "code", "source": "# answer: attend\nattend = " + "+".join("a" * 20_000)},
        {"cell_type": "code", "source": "# answer: attend\n%%bash\nrm -rf /"},
    ],
)
def test_odd_cells_cost_their_own_exercise_alone(tmp_path, cell):
    raw = SCHOOL.notebook({KEY: SCHOOL.ours[KEY]})
    raw["cells"] = [c for c in raw["cells"] if not c["source"].startswith("# answer: attend")]
    raw["cells"].append(cell)
    put(tmp_path, "a.ipynb", json.dumps(raw).encode())
    with Reader() as reader:  # in the child, as grading does it
        said = reader.read(tmp_path / "a.ipynb", [SLUG])
    answers = said["chapters"][SLUG]["answers"]
    assert answers[KEY]["tried"] and not answers[KEY]["problem"]
    assert answers["attend"]["problem"]


def test_links_pipes_and_folders_are_not_followed(tmp_path):
    for n, name in enumerate((IN_PART, f"work/{SLUG}.ipynb")):
        place = tmp_path / f"a{n}" / name
        place.parent.mkdir(parents=True)
        place.symlink_to(SCHOOL.chapter.ipynb)
        assert "it is a link" in problem(tmp_path / f"a{n}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notebooks").symlink_to(SCHOOL.chapter.md.parent.parent)
    assert "behind a link" in problem(tmp_path / "b")
    (tmp_path / "c" / "work").mkdir(parents=True)
    os.mkfifo(tmp_path / "c" / "work" / f"{SLUG}.ipynb")  # reading it would wait for ever
    assert "not a regular file" in problem(tmp_path / "c")
    (tmp_path / "d" / "work" / f"{SLUG}.ipynb").mkdir(parents=True)
    assert "not a regular file" in problem(tmp_path / "d")
    listed = tmp_path / "class"
    listed.mkdir()
    (listed / "eve").symlink_to(tmp_path / "a0")
    (listed / "eve.ipynb").symlink_to(SCHOOL.chapter.ipynb)
    assert [s.problem != "" for s in submissions.listed(listed)] == [True]


def test_zips_that_mean_two_things(tmp_path):
    def said(*named: tuple[str, bytes]) -> str:
        return problem(put(tmp_path, "a.zip", members(*named)))

    with pytest.warns(UserWarning, match="Duplicate"):
        assert "nearly so" in said((IN_PART, STUBS), (IN_PART, GOOD))
    assert "nearly so" in said((IN_PART, STUBS), (IN_PART.upper(), GOOD))
    assert "nearly so" in said((IN_PART, STUBS), (IN_PART.replace("/", "\\"), GOOD))
    assert "nearly so" in said((IN_PART, STUBS), (IN_PART.replace("k", "\u212a"), GOOD))
    link = zipfile.ZipInfo(IN_PART)
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for info in (link, zipfile.ZipInfo("notebooks/foundations")):
        info.external_attr = link.external_attr
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            archive.writestr(info, "/etc")
            if info is not link:
                archive.writestr(IN_PART, GOOD)
        assert "is a link" in problem(put(tmp_path, "l.zip", data.getvalue()))
    locked = bytearray(members((IN_PART, GOOD)))
    for signature, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        at = locked.index(signature) + offset
        locked[at : at + 2] = struct.pack("<H", 1)
    assert "encrypted" in problem(put(tmp_path, "e.zip", bytes(locked)))
    assert "10,001 members" in said(*[(f"x{n}", b"") for n in range(10_001)])
    assert "not a zip" in problem(put(tmp_path, "n.zip", GOOD))


def test_zip_bombs_and_damage(tmp_path):
    bomb = members((IN_PART, b"0" * (64 << 20)))
    assert len(bomb) < 1 << 20
    assert "too large" in problem(put(tmp_path, "b.zip", bomb))
    lying = bytearray(members((IN_PART, b"0" * (64 << 20))))
    at = lying.index(b"PK\x01\x02") + 24  # the size that the directory claims
    lying[at : at + 4] = struct.pack("<I", 100)
    assert problem(put(tmp_path, "l.zip", bytes(lying))) != ""
    hurt = bytearray(members((IN_PART, GOOD)))
    hurt[len(hurt) // 3] ^= 0xFF
    assert "cannot be unpacked" in problem(put(tmp_path, "h.zip", bytes(hurt)))
    climbing = members(("../../etc/passwd", b"x"), ("/abs", b"x"), (IN_PART, GOOD))
    before = sorted(p.name for p in tmp_path.parent.iterdir())
    assert problem(put(tmp_path, "c.zip", climbing)) == ""
    assert sorted(p.name for p in tmp_path.parent.iterdir()) == before


def test_the_list_of_a_class(tmp_path):
    put(tmp_path, f"bob/{IN_PART}", GOOD)
    put(tmp_path, "amy.ipynb", GOOD)
    put(tmp_path, "cid.zip", members((IN_PART, GOOD)))
    put(tmp_path, "cid.ipynb", GOOD)
    put(tmp_path, "notes.pdf", b"x")
    put(tmp_path, ".DS_Store", b"x")
    found = {s.id: s.problem for s in submissions.listed(tmp_path)}
    assert list(found) == ["amy", "bob", "cid", "notes.pdf"]
    assert found["amy"] == found["bob"] == ""
    assert "several submissions" in found["cid"] and "not a notebook" in found["notes.pdf"]
    assert [s.id for s in submissions.listed(tmp_path / "bob")] == ["bob"]
    assert [s.id for s in submissions.listed(tmp_path / "amy.ipynb")] == ["amy"]
    (tmp_path / "empty").mkdir()
    for wrong in ("empty", "nowhere"):
        with pytest.raises(CourseError, match="submissions"):
            submissions.listed(tmp_path / wrong)


@pytest.mark.parametrize("inner", ["work", "notebooks"])
def test_a_learner_called_work_does_not_stand_for_the_class(tmp_path, inner):
    put(tmp_path / "mine", f"work/{SLUG}.ipynb", GOOD)
    for beside in (f"{SLUG}.ipynb", "scratch.ipynb", "README.md", "data.zip", "results/a/x.ipynb"):
        put(tmp_path / "mine", beside, GOOD if beside.startswith(SLUG) else b"{}")
    (tmp_path / "mine" / "loop.ipynb").symlink_to("loop.ipynb")
    assert [s.id for s in submissions.listed(tmp_path / "mine")] == ["mine"]
    put(tmp_path / "class", f"{inner}/README.md", b"x")
    assert [s.id for s in submissions.listed(tmp_path / "class")] == ["class"]
    put(tmp_path / "class", f"{inner}/deeper/{IN_PART}", GOOD)
    put(tmp_path / "class", "anna.ipynb", GOOD)
    assert [s.id for s in submissions.listed(tmp_path / "class")] == ["anna", inner]
    place = f"{inner}/{SLUG}.ipynb" if inner == "work" else IN_PART
    put(tmp_path / "class", place, GOOD)
    with pytest.raises(CourseError, match=f"`{inner}`.*`anna.ipynb`.*rename"):
        submissions.listed(tmp_path / "class")


def test_ids_that_the_roster_cannot_tell_apart_are_one_student(tmp_path):
    for name in ("anna", "anna ", "caf\u00e9", "cafe\u0301", "bob"):
        put(tmp_path / "class", f"{name}.ipynb", GOOD)
    found = submissions.listed(tmp_path / "class")
    assert [submissions.normal(s.id) for s in found] == ["anna", "bob", "caf\u00e9"]
    assert ["several submissions" in s.problem for s in found] == [True, False, True]
    (tmp_path / "r.csv").write_text("id\ncaf\u00e9\ncafe\u0301\n", encoding="utf-8")
    with pytest.raises(CourseError, match="line 3, repeats"):
        submissions.roster(tmp_path / "r.csv")


def test_a_checkout_of_the_course_is_one_submission():
    assert [s.path for s in submissions.listed(ROOT)] == [ROOT]


def test_the_roster(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes('\ufeffName;ID;Email;Other\r\n"Ann; B"; s1 ;a@x;1\r\nBo;s2\r\n'.encode())
    assert submissions.roster(path) == [
        submissions.Student("s1", "Ann; B", "a@x"),
        submissions.Student("s2", "Bo"),
    ]
    for text, word in (
        ("name\nAnn\n", "no column `id`"),
        ("", "no column `id`"),
        ("id\ns1\ns1\n", "repeats `s1`"),
        ("id\n\x1b[31ms1\n\x1b[31ms1\n", "repeats `s1`"),
        ("id,name\n,Ann\n", "has no id"),
        ('id\n"s1\n', "not a CSV"),
    ):
        path.write_text(text)
        with pytest.raises(CourseError, match=word):
            submissions.roster(path)
    for data in (
        b"id\n\xff\n",
        "id\ns1\n".encode("utf-16"),
        b"sep=;\nid\n",
        b"id\tname\ns1\tAnn\n",
    ):
        path.write_bytes(data)
        with pytest.raises(CourseError, match="save it as CSV UTF-8"):
            submissions.roster(path)


@pytest.mark.parametrize("delimiter", [",", ";"])
def test_empty_rows_of_a_spreadsheet_are_nobody(tmp_path, delimiter):
    path = tmp_path / "r.csv"
    path.write_text(
        "\r\n,,\r\nid,name,x\r\ns1,Ann\r\n,,\r\n , \r\n\r\ns2\r\n,,".replace(",", delimiter)
    )
    assert submissions.roster(path) == [
        submissions.Student("s1", "Ann"),
        submissions.Student("s2"),
    ]
    path.write_text("id,name\n,,\n,Ann\n".replace(",", delimiter))
    with pytest.raises(CourseError, match="line 3, has no id"):
        submissions.roster(path)


def test_a_file_that_exhausts_the_reader_costs_itself_alone(tmp_path):
    put(tmp_path, "good.ipynb", GOOD)
    with Reader(seconds=0.001) as reader:
        assert "too much time or memory" in reader.read(tmp_path / "good.ipynb", [SLUG])["problem"]
        assert reader.present(tmp_path / "good.ipynb", [SLUG]) == []
    with Reader() as reader:
        assert reader.present(tmp_path / "good.ipynb", [SLUG, "serving"]) == [SLUG]
        child = reader._child
        assert child
        child.kill()
        child.wait()
        assert reader.read(tmp_path / "good.ipynb", [SLUG])["problem"] == ""
