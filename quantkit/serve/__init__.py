"""An OpenAI-compatible HTTP server for one model, so that benches and harnesses can judge a file.

It is no production server: one sequence is computed at a time, and requests wait in a queue. A request passes through

    server       the socket, the event loop (uvicorn), the end by Ctrl-C
    connections  how long a connection may be idle, and how many are open
    app          routes, API key, size of bodies, streaming, clients that disconnect (starlette)
    requests     JSON of strangers to a checked `Request`
    worker       the queue, and the only thread that runs the model and its tokenizer
    generation   a prompt to pieces of text with log-probabilities
    answers      pieces to the JSON of OpenAI's API
    api_error    what the API answers instead

Every size is bounded: bodies, waiting requests, connections and their idle time, tokens, log-probabilities. The package
uses `runtime` and `tokenizers`. Only `cli` imports it, and it is imported when `quantkit serve` runs: starlette and
uvicorn are the extra `serve`.
"""
