"""`dspark-export`: one click command per file; heavy imports inside the command."""
