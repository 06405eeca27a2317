"""Words that the retrieval tasks make keys of: short and common, of letters only."""

ADJECTIVES = (
    "amber bitter blue bold brave bright brown calm clean clever cold cool damp dark dry dull "
    "early empty fair fast fine firm flat fresh gentle gold grand gray great green happy heavy "
    "high hollow hot icy jolly keen kind large late light little long loud lucky mild narrow new "
    "noble odd old orange pale plain polite proud purple quick quiet rare"
).split()
NOUNS = (
    "anchor apple arrow badge basket beach bell bird boat bottle bridge bucket button cable candle "
    "castle chair clock cloud coat coin corner crown desk dragon drum eagle engine farmer feather "
    "field flower forest fox garden gate glove hammer harbor helmet hill horse island jacket "
    "kettle key ladder lake lamp lemon letter lion map market mirror moon mountain needle oven "
    "paper pencil piano"
).split()
