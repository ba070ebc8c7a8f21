"""`orders place --api` and `read-api` as a person runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from commands.api_client import ApiClient
from commands.parsing import WrongUsage
from contracts.errors import Unreachable
from store.effects import apply_sales
from store.outbox import find_event
from store.schema import control
from tests.http.server import ROOT, database_of, environment, problem, running


def starter(home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "starter.py", *words],
        cwd=ROOT,
        env=environment(home, **env),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_orders_are_placed_and_totals_read_through_the_api(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"  # the command has no part in the API's database
    with running(tmp_path / "home") as api:
        placed = starter(elsewhere, "orders", "place", "--start", "1", "--count", "3", "--api", api.url)
        assert (placed.returncode, placed.stdout) == (0, "3 orders placed\n"), placed.stderr
        again = starter(elsewhere, "orders", "place", "--count", "3", "--json", "--api", SAISEI_API_URL=api.url)
        document = json.loads(again.stdout)
        assert (document["placed"], document["known"]) == (0, 3)
        shown = starter(api.home, "orders", "show", "order-2", "--json")
        # The command line may tell more of an order, and nothing else.
        assert document["orders"][1].items() <= json.loads(shown.stdout).items()

        with database_of(api.home) as database:
            with database.write() as connection:
                apply_sales(connection, [find_event(connection, f"order-{n}").event for n in (1, 2, 3)])
            read = starter(elsewhere, "read-api", "--json", "--api", api.url)
            assert json.loads(read.stdout) == {
                "generation": "initial",
                "orders": 3,
                "totals": {"JPY": {"orders": 3, "amount": 600}},
            }
            table = starter(elsewhere, "read-api", SAISEI_API_URL=api.url)
            assert (table.returncode, table.stderr) == (0, "")
            assert table.stdout.splitlines() == [
                "generation  initial",
                "orders      3",
                "",
                "currency  orders  amount",
                "JPY       3       600",
            ]

            with database.write() as connection:
                connection.execute(sa.update(control).values(intake="PAUSED", paused_by="a test"))
        refused = starter(elsewhere, "orders", "place", "--start", "21", "--api", api.url)
        assert refused.returncode == 1
        assert refused.stdout == ""
        assert refused.stderr == "starter.py: order-21 was refused: 503 order intake paused\n"
        problem(api.client.get("/orders/order-21"), 404)
    assert not (elsewhere / "saisei.db").exists()

    nowhere = starter(elsewhere, "read-api")  # whatever listens at the usual port may be another home's
    assert nowhere.returncode == 1
    assert nowhere.stderr.startswith("starter.py: no API is up here; ")

    gone = starter(elsewhere, "read-api", "--api", api.url)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"starter.py: the API at {api.url} does not answer (")
    assert gone.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://127.0.0.1"])
def test_what_is_no_url_of_an_api_is_wrong_usage_in_one_sentence(url: str) -> None:
    with pytest.raises(WrongUsage, match="is no URL of an API") as caught:
        ApiClient(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:99999"])
def test_where_no_api_can_be_is_one_sentence(url: str) -> None:
    with pytest.raises(Unreachable) as caught, ApiClient(url) as client:
        client.sales()
    assert "\n" not in str(caught.value)
