"""Model families that start without importing all of SGLang's others. Any other family still loads: the slow way."""
