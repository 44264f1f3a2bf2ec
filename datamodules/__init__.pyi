from datamodules.images.folder import ImageFolder as ImageFolder
from datamodules.images.imagenet import ImageNet as ImageNet
from datamodules.lra.image import Image as Image
from datamodules.lra.listops import ListOps as ListOps
from datamodules.lra.pathfinder import Pathfinder as Pathfinder
from datamodules.lra.retrieval import Retrieval as Retrieval
from datamodules.lra.text import Text as Text
from datamodules.series.own import OwnSeries as OwnSeries
from datamodules.series.uea import UEA as UEA
from datamodules.synthetic import Synthetic as Synthetic
from datamodules.text.fine_tuning.pretraining import PretrainingText as PretrainingText
from datamodules.text.fine_tuning.question_answering import QuestionAnswering as QuestionAnswering
from datamodules.text.fine_tuning.text_pairs import TextPairs as TextPairs
from datamodules.text.masked_text import MaskedText as MaskedText
from datamodules.text.running import OwnText as OwnText
from datamodules.text.sentences.data import LM1B as LM1B
from datamodules.text.table import LabelledTexts as LabelledTexts
from datamodules.text.translation.data import Translation as Translation
from datamodules.text.translation.published.iwslt14 import IWSLT14 as IWSLT14
from datamodules.text.translation.published.wmt14 import WMT14 as WMT14
from datamodules.text.translation.toy import ToyTranslation as ToyTranslation
from datamodules.text.wikitext103 import WikiText103 as WikiText103
from datamodules.trajectories.data import Trajectories as Trajectories
from datamodules.trajectories.toy import ToyTrajectories as ToyTrajectories

__all__: list[str]
REGISTRY: dict[str, tuple[str, str]]
