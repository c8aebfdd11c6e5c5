"""Models on the Hugging Face Hub: addresses, headers, whole files, checkpoints as streams, uploads.

- `address` reads hf://ORG/NAME[@REVISION][/FILE].
- `client` lists a repository and reads ranges of its files, with retries.
- `headers` makes local files of which only the headers are there, for what needs no weights.
- `checkpoint` opens a checkpoint by its headers; `stream` brings its tensors once, `files` at any time; both in bounded
  disk (`disk`), each file checked (`hashes`).
- `models` gives commands the local path of what they are given.
- `upload` writes files and a card to a repository.

The package uses the public interface of huggingface_hub, which is imported when an address is first opened. It takes
addresses and gives paths, tensors and bytes. It imports `errors`, `inputs`, `progress` and `formats`.
"""
