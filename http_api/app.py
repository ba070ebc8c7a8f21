"""The routes: what is asked is translated to the store and back; the rules are in contracts, the writes in intake."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

from contracts.errors import NotFound
from contracts.identifiers import id_problem
from contracts.orders import parse_order
from http_api import problems
from http_api.body import read_object
from http_api.orders_desk import OrdersDesk
from http_api.problems import JsonAnswer, unavailable
from http_api.readiness import Readiness
from http_api.schemas import SCHEMAS, answer, path_parameter, problem, request_body
from intake import Intake
from store.documents import order_document, sales_document, status_document
from store.orders import PlacedOrder, get_order

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_DATABASE = {503: problem("the database does not answer or is busy; Retry-After says when to ask again")}


def build_app(desk: OrdersDesk, intake: Intake, readiness: Readiness, lifespan: Lifespan) -> FastAPI:
    """The application. `app.state.stopping` is set once the process was told to stop."""
    app = FastAPI(
        title="Saisei",
        version="0.1.0",
        description="Place orders, and read them, their totals and the state of the pipeline.",
        # The pages would fetch their scripts from the network; the schema itself is served.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # an id may end with a slash
        lifespan=lifespan,
    )
    app.state.stopping = False
    problems.register(app)

    def reads(path: str, **description: Any) -> Callable[[Callable[..., Awaitable[Response]]], None]:
        def add(endpoint: Callable[..., Awaitable[Response]]) -> None:
            app.add_api_route(path, endpoint, methods=["GET"], response_model=None, **description)
            app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)

        return add

    @app.post(
        "/orders",
        summary="Place an order",
        response_model=None,
        status_code=201,
        openapi_extra={"requestBody": request_body("Order")},
        responses={
            200: answer("PlacedOrder", "the same order was placed before; this is its first answer again"),
            201: answer("PlacedOrder", "the order is durable"),
            400: problem("the body is not JSON in UTF-8"),
            408: problem("the body was not complete in time"),
            409: problem("the id was placed before with other content; nothing was changed"),
            413: problem("the body has more than 64 KiB"),
            415: problem("the body is not declared as JSON"),
            422: problem("no usable order; `fields` says what is wrong with each field"),
            503: problem("order intake is paused, or the database does not answer; nothing was written"),
        },
    )
    async def place(request: Request) -> Response:
        placed = await desk.place(parse_order(await read_object(request)))
        await intake.wake_if_cold(placed)  # only notes that it is due
        return JsonAnswer(order_document(placed), status_code=201 if placed.created else 200)

    @reads(
        "/orders/{order_id:path}",
        summary="One order",
        # Declared here: as an argument of the function it would bring an answer into the schema that is never given.
        openapi_extra={"parameters": [path_parameter("order_id", "PlacedOrder", "id")]},
        responses={200: answer("PlacedOrder", "the order"), 404: problem("no such order"), **_DATABASE},
    )
    async def show(request: Request) -> Response:
        order_id: str = request.path_params["order_id"]
        missing = NotFound(f"there is no order {order_id[:200]}")
        if id_problem(order_id):
            raise missing  # never asked for: not every database can hold such a text

        def find(connection: Any) -> PlacedOrder:
            try:
                return get_order(connection, order_id)
            except NotFound:
                raise missing from None

        placed = await desk.read(find)
        if placed.order.id != order_id:
            raise missing  # the id of its event: an order has one address
        return JsonAnswer(order_document(placed))

    @reads("/sales", summary="Totals of the active generation", responses={200: answer("Sales", "totals"), **_DATABASE})
    async def sales() -> Response:
        return JsonAnswer(await desk.read(sales_document))

    @reads(
        "/status", summary="What there is and where it stands", responses={200: answer("Status", "counts"), **_DATABASE}
    )
    async def status() -> Response:
        return JsonAnswer(await desk.read(status_document))

    @reads("/livez", summary="Whether the process answers", responses={200: answer("Alive", "it does")})
    async def alive() -> Response:
        return JsonAnswer({"alive": True})

    @reads(
        "/readyz",
        summary="Whether orders can be taken, and which server answers",
        responses={200: answer("Health", "orders can be taken"), 503: problem("they cannot, or the API is stopping")},
    )
    async def ready() -> Response:
        checks = await readiness.checks()
        document = {name: check.document() for name, check in checks.items()}
        if not app.state.stopping and checks["database"].ok:
            return JsonAnswer({"ready": True, "checks": document})
        reason = "the API is stopping" if app.state.stopping else f"the database {checks['database'].detail}"
        return unavailable(reason, kind="not-ready", title="Not ready", ready=False, checks=document)

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(SCHEMAS)
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
    return app
