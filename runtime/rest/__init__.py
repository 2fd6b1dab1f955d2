"""The REST API of a coordinator, and its client.

The types that travel (`answers.py`), the table of paths (`routes.py`), the OpenAPI document that is made of
both (`openapi.py`) and the checks of requests (`requests.py`) are without I/O. `server.py` serves them with
aiohttp, and `client.py` is the client for asyncio.
"""
