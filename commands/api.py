"""`read-api`: the totals as the HTTP API serves them, so that what a caller sees can be compared with the database."""

from argparse import Namespace

from commands.api_client import HERE, ApiClient, add_api_flag, api_url
from commands.context import Context
from commands.parsing import Commands
from contracts.errors import Unreachable


def add(commands: Commands) -> None:
    """Register the command."""
    parser = commands.command("read-api", _read, "starter.py read-api")
    add_api_flag(parser, "the API to ask", default=HERE)


async def _read(context: Context, args: Namespace) -> int:
    url = api_url(context, args.api)
    with ApiClient(url) as api:
        sales = api.sales()
    if context.json:
        context.result(sales)
        return 0
    try:
        fields = {"generation": sales["generation"], "orders": f"{sales['orders']:,}"}
        rows = [
            (currency, f"{total['orders']:,}", f"{total['amount']:,}") for currency, total in sales["totals"].items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError):
        raise Unreachable(f"what answers at {url} is not Saisei's API; correct --api or SAISEI_API_URL") from None
    context.fields(fields)
    context.line("")
    context.table(["currency", "orders", "amount"], rows)
    return 0
