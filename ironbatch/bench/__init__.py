"""`ironbatch bench`: a load generator that checks every stream it reads."""
