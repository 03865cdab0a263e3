"""The served report over HTTP: two addresses, what is new, and nothing else of the machine."""

from __future__ import annotations

import http.client
import json
import re
import threading

import pytest

from fivefold.cli import main
from fivefold.observability.run_logger import append_json
from fivefold.observability.serve import ReportServer

EVIL = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture
def served(tmp_path):
    for name in ("one", EVIL.replace("/", ":")[:40]):
        (tmp_path / name).mkdir()
        append_json(tmp_path / name / "metrics.jsonl", {"step": 1, "reward/mean": 0.25, EVIL: 1.0, "wall": 1.0})
        append_json(tmp_path / name / "samples.jsonl", {"step": 1, "prompt": EVIL, "response": EVIL, "reward": 1.0})
        (tmp_path / name / "run.yaml").write_text(f"name: {EVIL!r}")
    (tmp_path / "secret").write_text("not for you")
    with ReportServer(sorted(path for path in tmp_path.iterdir() if path.is_dir()), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: ReportServer, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("GET", f"/{server.token}{path}", headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(served):
    status, page, _ = ask(served, "/")
    assert status == 200 and "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert not re.search(r"<(link|img|iframe|object)|<script[^>]*src|@import|url\(", page)


def test_texts_of_models_and_data_are_no_markup(served):
    _, page, _ = ask(served, "/")
    assert page.count("<script") == 2 and "<img" not in page and "script-src 'sha256-" in page


def test_only_what_is_new_is_sent(served):
    have = json.loads(ask(served, "/data")[1])["runs"]
    assert [len(run["rows"]) for run in have] == [1, 1]
    append_json(served.views[1].run_dir / "metrics.jsonl", {"step": 2, "reward/mean": 0.5})
    query = ",".join(f"{run['generation']}.{run['rows_end']}.{run['samples_end']}" for run in have)
    runs = json.loads(ask(served, f"/data?have={query}")[1])["runs"]
    assert [[row["step"] for row in run["rows"]] for run in runs] == [[], [2]] and not any(run["samples"] for run in runs)
    assert len(json.loads(ask(served, "/data?have=9.9.9,x")[1])["runs"][0]["rows"]) == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "run.yaml"])
def test_raw_files_of_each_run_are_sent_whole_to_be_saved(served, name):
    for place, view in enumerate(served.views):
        status, content, headers = ask(served, f"/raw/{place}/{name}")
        assert (status, content) == (200, (view.run_dir / name).read_text())
        assert re.fullmatch(rf'attachment; filename="[\w.-]+-{name}"', headers["Content-Disposition"])
        assert headers["Content-Type"].startswith("text/plain") and headers["X-Content-Type-Options"] == "nosniff"
    path = served.views[1].run_dir / name
    path.unlink()
    assert ask(served, f"/raw/1/{name}")[0] == 404
    path.symlink_to(served.views[0].run_dir.parent / "secret")
    assert ask(served, f"/raw/1/{name}")[0] == 404, "a link is not followed"


def test_a_large_raw_file_is_sent_as_it_was_when_it_was_asked_for(served):
    path = served.views[0].run_dir / "samples.jsonl"
    path.write_bytes(b"x" * (3 * 2**20 + 1))
    assert len(ask(served, "/raw/0/samples.jsonl")[1]) == 3 * 2**20 + 1


@pytest.mark.parametrize(
    "path",
    [
        "/raw/0/status.json",
        "/raw/2/run.yaml",
        "/raw/0/../secret",
        "/raw/-1/run.yaml",
        "/raw/0/lock",
        "/raw/9999/run.yaml",
        "/secret",
        "/../secret",
        "/one/run.yaml",
        "/%2e%2e/secret",
        "//etc/passwd",
        "/data/../../secret",
        "/?x/../secret",
    ],
)
def test_no_file_can_be_reached(served, path):
    status, content, _ = ask(served, path)
    assert "not for you" not in content and "root:" not in content
    assert status == (200 if path.startswith("/?") else 404)


@pytest.mark.parametrize("path", ["/", "/data", "/x/", "/x/data", "//data"])
def test_nothing_is_served_without_the_token_of_the_address(served, path):
    connection = http.client.HTTPConnection("127.0.0.1", served.server_address[1], timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 404 and EVIL not in (text := answer.read().decode()) and served.token not in text
    assert served.url.endswith(f"/{served.token}/") and len(served.token) >= 32


def test_a_page_from_elsewhere_cannot_read_through_a_name_of_its_own(served):
    assert ask(served, "/data", Host="evil.example")[0] == 403
    assert ask(served, "/data", Host=f"localhost:{served.server_address[1]}")[0] == 200


def test_addresses_that_are_not_available_are_refused_in_a_sentence(served, capsys):
    run = str(served.views[0].run_dir)
    assert main(["report", "--serve", "--host", "203.0.113.7", run]) == 2
    assert main(["report", "--serve", "--port", str(served.server_address[1]), run]) == 2
    assert capsys.readouterr().err.count("--host and --port must be an address that is free on this machine") == 2
    with pytest.raises(SystemExit):
        main(["report", "--serve", "--port", "70000", run])
