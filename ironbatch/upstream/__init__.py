"""The client of a model server behind a URL: HTTP, server-sent events, and the dialects that model servers speak."""
