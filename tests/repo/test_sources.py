"""Small things that would rot in silence: head comments, settings, names of places, links."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT, name_of, native_sources, tracked_files, without_comments

import deepspeed_comm
from deepspeed_comm._plugin import load_extension

TEXTS = [file for file in tracked_files() if b"\0" not in file.read_bytes()[:4096]]
PAGES = [file for file in TEXTS if file.suffix == ".md"]


def starts_with_a_comment(file: Path) -> bool:
    return file.read_text().startswith("// ")


@pytest.mark.parametrize(
    "file",
    [*native_sources("csrc"), *native_sources("tests"), *native_sources("benchmarks")],
    ids=name_of,
)
def test_every_source_begins_with_a_comment(file: Path) -> None:
    twin = file.with_suffix(".h")
    told_by_twin = file.suffix == ".cc" and twin.exists() and starts_with_a_comment(twin)
    # The test of a header is told by the header that it names first.
    subject = re.match(r'#include "(core/\S+\.h)"', file.read_text())
    told_by_subject = file.name.endswith("_test.cc") and subject is not None
    assert starts_with_a_comment(file) or told_by_twin or told_by_subject


# What runs or helps others; the name of a test module may be enough.
MODULES = [
    file
    for file in TEXTS
    if file.suffix == ".py" and not file.name.startswith(("test_", "conftest", "__init__"))
]


@pytest.mark.parametrize("file", MODULES, ids=name_of)
def test_every_module_begins_with_a_docstring_or_comment(file: Path) -> None:
    assert re.match(r'(#!.*\n)?(r?"""|# )', file.read_text())


def test_no_file_contains_a_path_of_a_home_folder() -> None:
    place = re.compile(r"(?<![\w./])/(?:root|home/\w+|Users/\w+)/[\w.]")
    assert place.search("built in /home/someone/project")
    named = [
        f"{name_of(file)}: {line.strip()}"
        for file in TEXTS
        if file != Path(__file__)
        for line in file.read_text(errors="replace").splitlines()
        if place.search(line)
    ]
    assert not named


def setting_names() -> set[str]:
    return {row["name"] for row in load_extension().settings()}


def test_settings_page_matches_the_extension() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "settings_doc"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    page = (ROOT / "docs" / "settings.md").read_text()
    assert set(re.findall(r"^\| `(DSCOMM_\w+)`", page, re.M)) == setting_names()


def test_only_listed_files_read_the_environment() -> None:
    readers = [
        name_of(file)
        for file in native_sources()
        if re.search(r"\b(secure_)?getenv\s*\(|\benviron\b", without_comments(file.read_text()))
    ]
    # Besides the settings: what MPI and PMIx are told, and where a helper's files go.
    assert readers == [
        "csrc/core/base/settings.cc",
        "csrc/mpi/environment.cc",
        "csrc/pmix/main.cc",
    ]


def test_version_is_the_same_in_all_files() -> None:
    version = deepspeed_comm.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    [latest, *_] = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert latest.partition(",")[0] == version


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_settings_that_exist(page: Path) -> None:
    build_options = set(re.findall(r"DSCOMM_\w+", (ROOT / "CMakeLists.txt").read_text()))
    # A page may show the error about a name that does not exist.
    text = re.sub(r"DSCOMM_\w+ is not a setting", "", page.read_text())
    named = set(re.findall(r"\bDSCOMM_[A-Z0-9_]+\b", text))
    assert named <= setting_names() | build_options


def anchors_of(page: Path) -> set[str]:
    """Those of its headings, as GitHub and MkDocs make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_pages_have_targets(page: Path) -> None:
    dead = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            dead.append(f"{link}#{anchor}")
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_files_that_exist(page: Path) -> None:
    """`csrc/core/shm/mailbox/wait.h` and the like, in backquotes, from the root of the tree."""
    folders = "csrc|deepspeed_comm|docs|examples|tests|tools|benchmarks|cmake"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())
    dead = [name for name in named if not (ROOT / name).exists()]
    assert not dead


def literals() -> str:
    """All texts in the sources, those that stand side by side as one."""
    found = []
    for file in [*native_sources(), *sorted((ROOT / "deepspeed_comm").rglob("*.py"))]:
        text = re.sub(r'""".*?"""', "", file.read_text(), flags=re.S)  # docstrings are no messages
        # Half a sentence may continue in the next literal of the same call.
        found += re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'(?<=[^\\])"\s*\+?\s*f?"', "", text))
    return "\n".join(found)


def share_of_words_known(message: str, known: str) -> float:
    """How much of a message stands in the sources, but for the names and numbers filled in."""
    words = message.split()
    own = [word for word in words if not re.fullmatch(r"rank|\d+[,;]?|.*….*", word)]
    seen = set()
    for start in range(len(words) - 2):
        if " ".join(words[start : start + 3]) in known:
            seen |= {start, start + 1, start + 2}
    return len(seen) / len(own)


def own_names(source: str) -> set[str]:
    """The constants and types in the unnamed namespace of a file."""
    names = set()
    for body in re.findall(r"^namespace \{\n(.*?)^\}  // namespace$", source, re.S | re.M):
        names |= set(re.findall(r"^const[^=({\n]*?\b(k\w+)\s*[={]", body, re.M))
        names |= set(re.findall(r", (k[A-Z]\w+)\s*[={]", body))
        names |= set(re.findall(r"^(?:class|struct) (\w+)", body, re.M))
    return names


def test_private_names_of_core_files_are_unique() -> None:
    """Sanitizers compile several files as one, and which ones changes with every new file."""
    files: dict[str, list[str]] = {}
    for file in native_sources("csrc/core"):
        for name in own_names(file.read_text()):
            files.setdefault(name, []).append(name_of(file))
    assert len(files) > 100
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_messages_name_no_page_of_the_repository() -> None:
    """A wheel has no docs folder: what to do stands in the message, or `dscomm` shows it."""
    pages = re.compile(r"docs/|\b(README|CONTRIBUTING|[a-z_]+)\.md\b")
    assert pages.search("see docs/settings.md") and pages.search("see settings.md")
    named = [text for text in literals().split("\n") if pages.search(text)]
    assert named == []


def test_messages_on_the_troubleshooting_page_are_in_the_sources() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    text = re.sub(r"torch: `[^`\n]+`", "", page)  # torch's own messages are marked so
    quoted = re.findall(r"`([^`\n]+)`", text)
    messages = [each for each in quoted if len(each.split()) > 5]
    known = literals()
    assert len(messages) > 15
    shares = {message: share_of_words_known(message, known) for message in messages}
    # Where values stand in a message, few words in a row are in the sources; "…" stands for one.
    least = {True: 0.4, False: 0.7}
    low = {
        message: share
        for message, share in shares.items()
        if share < least[message.startswith("dscomm: ")]  # an example, with values
    }
    assert low == {}
    assert share_of_words_known("this sentence is in none of the sources", known) == 0


def test_any_core_tests_can_be_compiled_as_one(tmp_path: Path) -> None:
    """Builds of tests unite twelve files each, and which ones meet depends on the list of files. So
    the names in their unnamed namespaces must differ in all."""
    lines = (ROOT / "CMakeLists.txt").read_text()
    [alone] = re.findall(r"set\(test_sources_alone (.*)\)", lines)
    names = {f"{name}_test.cc" for name in alone.split()}
    folders = (ROOT / "tests" / "core", ROOT / "tests" / "transports")
    files = [file for folder in folders for file in sorted(folder.glob("*_test.cc"))]
    united = [file for file in files if file.name not in names]
    assert len(united) == len(files) - len(names) > 12
    source = tmp_path / "all.cc"
    source.write_text("".join(f'#include "{file}"\n' for file in united))
    options = ["-std=c++20", "-fsyntax-only", f"-I{ROOT}/tests/core", f"-I{ROOT}/csrc"]
    result = subprocess.run(["c++", *options, source], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
