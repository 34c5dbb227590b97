"""Measurements in processes of their own: what they print, and how they fail."""

import sys

import pytest

from benchmarks import processes


def run_code(code: str, **options) -> dict:
    return processes.run_json([sys.executable, "-c", code], **options)


def test_the_last_printed_line_is_the_result():
    code = "import os; print('compiling'); print('{\"seconds\": %s}' % os.environ['COUNT'])"
    assert run_code(code, variables={"COUNT": "3"}) == {"seconds": 3}


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("raise ValueError('a\\nb')", "exit code 1: b"),
        ("import os; os.kill(os.getpid(), 9)", "died by SIGKILL"),
        ("pass", "printed no result"),
        ("print('Traceback')", "printed no JSON: Traceback"),
    ],
)
def test_a_failed_process_is_one_row(code, failure):
    assert run_code(code) == {"failed": failure}


def test_a_process_that_hangs_is_ended_with_its_children(tmp_path):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_code(code, limit_s=1) == {"failed": "no result after 1 s"}
    assert run_code("import time; time.sleep(2); print('{}')") == {}
    assert not (tmp_path / "alive").exists()


def test_a_program_that_is_not_there_is_one_row():
    failure = processes.run_json(["/nowhere/python", "-V"])["failed"]
    assert failure.startswith("/nowhere/python does not start: ")


def test_a_worker_gets_its_task_and_returns_its_result():
    result = processes.run_worker("tests.benchmarks.echo", {"value": [1, 2]})
    assert result == {"got": {"value": [1, 2]}}


TALKS = """
import json, sys
print("a library's line"); print(json.dumps({"ready": True}), flush=True)
while sys.stdin.readline():
    print(json.dumps({"told": True}), flush=True)
    raise SystemExit("the reason")
"""


def test_a_conversation_waits_until_it_is_told_to_go_on():
    talk = processes.Conversation([sys.executable, "-c", TALKS])
    assert talk.hear(60) == {"ready": True}
    assert talk.hear(0.2) == {"failed": "no result after 0.2 s"}
    talk = processes.Conversation([sys.executable, "-c", TALKS])
    talk.hear(60)
    talk.tell()
    assert talk.hear(60) == {"told": True}
    assert talk.hear(60) == {"failed": "exit code 1: the reason"}
    talk.tell()  # It has ended: no error.
    talk.end()
    absent = processes.Conversation(["/nowhere/python"])
    assert absent.hear(1)["failed"].startswith("/nowhere/python does not start: ")
    absent.end()


def test_a_conversation_with_a_module_gets_its_task():
    talk = processes.Conversation.of("tests.benchmarks.echo", [1, 2])
    assert talk.hear(60) == {"got": [1, 2], "turn": 0}
    talk.tell()
    assert talk.hear(60) == {"got": [1, 2], "turn": 1}
    talk.end()
