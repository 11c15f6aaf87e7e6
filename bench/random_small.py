"""An untrained ELECTRA-Small with BERT's vocabulary, as a transformers folder: what both sides of a comparison start from."""

from pathlib import Path


def random_small(folder: Path, vocabulary: Path) -> Path:
    from electra.data.tokenizer import adopt_vocabulary, vocabulary_size
    from electra.interop.read import Pretrained
    from electra.interop.write import write_network
    from electra.model import initialise
    from electra.model.electra import ElectraEmbeddings, ElectraEncoder, ElectraEncoderSettings
    from electra.model.heads import ElectraDetectionHead

    if not folder.exists():
        tokenizer, settings = adopt_vocabulary(vocabulary), ElectraEncoderSettings()
        encoder = ElectraEncoder(settings, ElectraEmbeddings(settings, vocabulary_size(tokenizer)))
        head = ElectraDetectionHead(settings)
        initialise(encoder, settings, 1)
        initialise(head, settings, 2)
        write_network(folder, Pretrained(encoder, head, "discriminator", tokenizer), "untrained")
    return folder
