"""SGLang engines: their flags, their processes, the router before them."""
