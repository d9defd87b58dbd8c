"""pytest puts the folder of this file on the import path, so every test can write ``import tiny``."""
