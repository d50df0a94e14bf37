"""An OpenAI-compatible HTTP server over the engine. `run_server` is the way in; `create_app` embeds it."""
