"""tools/release: what it refuses, and the tag that it makes."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

TODAY = datetime.date.today().isoformat()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a release of today."""
    for name in ("tools/release", "deepspeed_comm/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / "deepspeed_comm/__init__.py").write_text('__version__ = "0.2.0"\n')
    newest = f"## 0.2.0, {TODAY}\n\n- New.\n- Old.\n"
    text = f"# Changes\n\n{newest}\n## 0.1.0, 2026-01-01\n\n- One.\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "user.name", "test")
    git(tmp_path, "config", "user.email", "test@example.org")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=tree, check=True, capture_output=True, text=True
    ).stdout


def commit(tree: Path) -> None:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "a change")


def release(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(tree / "tools/release"), *arguments], capture_output=True, text=True
    )


def test_release_is_tagged_with_its_notes(tree: Path) -> None:
    result = release(tree)
    assert result.returncode == 0, result.stderr
    assert "git push origin v0.2.0" in result.stdout
    message = git(tree, "tag", "--list", "v0.2.0", "--format=%(contents)")
    assert message.strip() == "deepspeed_comm 0.2.0\n\n- New.\n- Old."
    assert release(tree, "--notes").stdout == "- New.\n- Old.\n"
    assert "the tag v0.2.0 exists" in release(tree).stderr


def test_release_dated_another_day_is_refused(tree: Path) -> None:
    page = tree / "CHANGELOG.md"
    page.write_text(page.read_text().replace(TODAY, "not yet released"))
    commit(tree)
    assert "dates 0.2.0 'not yet released', and today is" in release(tree).stderr


def test_release_of_another_version_is_refused(tree: Path) -> None:
    (tree / "deepspeed_comm/__init__.py").write_text('__version__ = "0.3.0"\n')
    commit(tree)
    assert "begins with 0.2.0, and deepspeed_comm/__init__.py has 0.3.0" in release(tree).stderr


def test_release_with_uncommitted_changes_is_refused(tree: Path) -> None:
    (tree / "new").touch()
    result = release(tree)
    assert result.returncode == 1 and "the tree is not clean" in result.stderr
    assert git(tree, "tag") == ""


def test_release_notes_of_this_tree_are_found() -> None:
    assert release(ROOT, "--notes").stdout.startswith("The first version.")
