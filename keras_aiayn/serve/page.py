"""The page at `/`: files of the package, which ask no other server for anything."""

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI, Response

# Each by its path, with its type. Paths within the files are relative: a proxy may add a prefix.
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/picture.js": ("picture.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a newer package has other files under the same names
}


def add_page(app: FastAPI) -> None:
    """Lets an application give the page, to whoever asks: it holds no secret."""
    for path, (name, media_type) in FILES.items():
        content = (resources.files("keras_aiayn.serve") / "static" / name).read_bytes()
        response = Response(content, media_type=media_type, headers=HEADERS)
        app.add_api_route(path, _always(response), include_in_schema=False)


def _always(response: Response) -> Callable[[], Awaitable[Response]]:
    async def give() -> Response:
        return response

    return give
