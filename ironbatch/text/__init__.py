"""Tokenizers: prompts that are text become token ids, and token ids become text, in the web workers."""
