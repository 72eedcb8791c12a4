"""Steps that take less room: their files compressed, against an older step's if that gains. Imports no torch."""
