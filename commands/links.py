"""Links into Temporal's Web UI, and `links`, which prints them."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from commands.parsing import Commands
from contracts.errors import Refused
from contracts.names import FAN_OUT_ID, RELAY_ID, receiver_id

if TYPE_CHECKING:
    from commands.context import Context

NO_UI = "there is no Web UI here; start one with `make up`, or set TEMPORAL_UI_URL"


@dataclass(frozen=True)
class Links:
    """Builds links; `ui` is the Web UI's address."""

    ui: str
    namespace: str = "default"

    def workflow(self, workflow_id: str) -> str:
        """The newest run of that id. Ids hold slashes, which must not end a part of the path."""
        return f"{self._workflows}/{quote(workflow_id, safe='')}"

    def query(self, query: str) -> str:
        """The list of runs that the visibility query finds."""
        return f"{self._workflows}?query={quote(query, safe='')}"

    def failing(self, receiver: str) -> str:
        """The events that this receiver failed to take and that are still tried."""
        return self.query(f'WorkflowType="DeliveryWorkflow" AND Receiver="{receiver}" AND ExecutionStatus="Running"')

    def everything(self, receivers: Iterable[str]) -> list[tuple[str, str]]:
        """(what, link): the pipeline's runs, each receiver's failing events, the jobs."""
        receivers = list(receivers)
        stages = [RELAY_ID, FAN_OUT_ID, *(receiver_id(name) for name in receivers)]
        return [
            *((stage, self.workflow(stage)) for stage in stages),
            *((f"failing at {name}", self.failing(name)) for name in receivers),
            ("jobs", self.query('WorkflowType="FulfilmentWorkflow"')),
            ("everything", self._workflows),
        ]

    @property
    def _workflows(self) -> str:
        return f"{self.ui.rstrip('/')}/namespaces/{quote(self.namespace, safe='')}/workflows"


def add(commands: Commands) -> None:
    """Register the command."""
    commands.command("links", _links, "starter.py links")


async def _links(context: "Context", args: Namespace) -> int:
    links = context.links
    if links is None:
        raise Refused(NO_UI)
    from receivers.registry import by_name  # here, as in Context

    found = links.everything(by_name())
    if context.json:
        context.result(dict(found))
    else:
        # Not a table: a link that a column folds can be neither clicked nor copied.
        context.fields(dict(found))
    return 0
