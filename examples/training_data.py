"""Synthetic training data of the example adapters: questions, hand-written answers, text transforms.

Nothing is downloaded. `shout`, `pirate` and `json` restyle the base model's own greedy answers to
`QUESTIONS`; `rhyme` and `spanish` use the small hand-written tables below. None of `HELD_OUT` (the prompts
of the before/after samples) occurs in any table.
"""

import json
import re

HELD_OUT = ("What is the capital of France?", "Tell me about the sea.", "How do I make a cup of tea?")

_COUNTRIES = ("Italy", "Spain", "Japan", "Germany", "Egypt", "Canada", "Portugal", "Norway", "Greece", "Peru")
_THINGS = (
    "a volcano", "a computer", "photosynthesis", "gravity", "a river", "democracy", "a novel", "a bicycle",
    "the moon", "a guitar", "bread", "a library", "a rainbow", "an atom", "a whale", "electricity", "music",
    "a desert", "an island", "the internet",
)  # fmt: skip
_TOPICS = (
    "the mountains", "dogs", "cats", "the sun", "winter", "the forest", "coffee", "Rome", "birds", "trains",
    "chess", "football", "the ocean floor", "robots", "horses", "the stars", "summer", "cheese", "China",
    "painting", "bees", "rice", "castles", "the desert", "ships",
)  # fmt: skip
_TASKS = (
    "boil an egg", "learn to swim", "write a letter", "clean a window", "plant a tree", "sleep better",
    "bake bread", "save money", "fix a flat tire", "learn a language", "draw a cat", "stay healthy",
    "make a salad", "wash a car", "find a job",
)  # fmt: skip
_OTHERS = (
    "Hello!", "Good morning.", "How are you today?", "Who are you?", "What can you do?", "Thank you!",
    "Why is the sky blue?", "Why do we sleep?", "Why do leaves fall in autumn?", "Why is water wet?",
    "Who wrote Romeo and Juliet?", "Who painted the Mona Lisa?", "What is two plus two?",
    "What is the largest planet?", "Name three colors.", "Give me some advice.", "Tell me a short story.",
    "What should I eat tonight?", "What is your favorite animal?", "Where do penguins live?",
    "When did the Second World War end?", "How many days are in a week?", "How far away is the sun?",
    "Describe a sunset.", "What do plants need to grow?", "What is the opposite of hot?",
    "What is the fastest animal?", "Tell me a fun fact.", "How does a plane fly?", "What makes a good friend?",
)  # fmt: skip

QUESTIONS: tuple[str, ...] = (
    *(f"What is the capital of {country}?" for country in _COUNTRIES),
    *(f"What is {thing}?" for thing in _THINGS),
    *(f"Tell me about {topic}." for topic in _TOPICS),
    *(f"How do I {task}?" for task in _TASKS),
    *_OTHERS,
)

COUPLETS: tuple[tuple[str, str], ...] = (
    ("the moon", "The moon is a lamp in the sky so high,\nIt smiles on the world as the night goes by."),
    ("the sun", "The sun climbs up with a golden light,\nAnd chases away the dark of the night."),
    ("winter", "In winter the snow falls soft and white,\nAnd fires burn warm through the long cold night."),
    ("summer", "In summer the days are long and bright,\nAnd fireflies dance in the warm, soft night."),
    ("dogs", "A dog is a friend who will always stay,\nHe wags his tail and is ready to play."),
    ("cats", "A cat likes to sleep in a patch of sun,\nAnd dreams of the mice and the races she won."),
    ("birds", "The birds in the trees all sing their song,\nThey sing and they fly the whole day long."),
    ("rain", "The rain comes down on the old tin roof,\nIt taps and it drums like a pony's hoof."),
    ("the forest", "The forest is deep and the trees are tall,\nWith room for the creatures, big and small."),
    ("the mountains", "The mountains stand with their heads of snow,\nAnd watch the rivers run far below."),
    ("a river", "A river runs down from the hill so steep,\nTo the wide blue water, so calm and deep."),
    ("the stars", "The stars are candles, so small and bright,\nThat somebody lit to keep watch at night."),
    ("coffee", "A cup of coffee, so black and hot,\nWill wake you up when your bed will not."),
    ("bread", "The bread in the oven is warm and brown,\nThe best you can eat in the whole of the town."),
    ("music", "Music can make a sad heart sing,\nIt floats on the air like a bird on the wing."),
    ("a computer", "A computer can count and can think so fast,\nIt stores all the things from the present and past."),
    ("gravity", "Gravity pulls all the things to the ground,\nIt keeps both our feet and the moon going round."),
    ("a volcano", "A mountain with fire and smoke inside,\nWhen it starts to roar, you should run and hide."),
    ("a book", "A book is a door to a far-off land,\nYou open it up with a turn of your hand."),
    ("a friend", "A friend is someone who holds your hand,\nWho listens to you and will understand."),
    ("trains", "The train runs fast on its rails of steel,\nIt sings to the track with a turning wheel."),
    ("horses", "A horse runs free on the hills so green,\nThe fastest runner you have ever seen."),
    ("robots", "A robot is built out of wire and steel,\nIt works all day but it cannot feel."),
    ("bees", "The bees in the garden all hum and buzz,\nThey love every flower that ever was."),
    ("cheese", "Cheese can be yellow or blue or white,\nIt tastes so good in every bite."),
    ("spring", "In spring all the flowers wake up to play,\nThe cold and the snow have gone away."),
    ("autumn", "In autumn the leaves turn red and gold,\nThe days get short and the nights get cold."),
    ("the wind", "The wind blows high and the wind blows low,\nIt carries the seeds to where they grow."),
    ("a garden", "A garden needs water and sun and care,\nAnd soon there are flowers everywhere."),
    ("sleep", "When you go to sleep at the end of the day,\nYour dreams will carry you far away."),
    ("love", "Love is a light that will never grow old,\nIt warms up the heart when the world is cold."),
    ("time", "Time is a river that flows so fast,\nThe future comes and becomes the past."),
    ("fish", "The fish swim deep where the water is blue,\nThey have nowhere to go and nothing to do."),
    ("castles", "The castle stands on a hill of stone,\nWhere a king once sat on his golden throne."),
    ("snow", "The snow comes down without a sound,\nAnd puts a white blanket on the ground."),
    ("ships", "The ship sails out on the morning tide,\nWith a brave old captain to be its guide."),
    ("apples", "An apple is red and an apple is sweet,\nThe very best thing for a child to eat."),
    ("school", "At school you will learn how to read and write,\nSo do all your homework before the night."),
    ("elephants", "The elephant's ears are as big as a tree,\nHe never forgets what his eyes can see."),
    ("the desert", "The desert is hot and the desert is dry,\nThere is nothing but sand and a big blue sky."),
    ("chess", "In chess you must think of the moves ahead,\nOr your king will be caught in his royal bed."),
    ("football", "They kick the ball with a mighty roar,\nAnd everyone cheers when the players score."),
)  # fmt: skip

RHYMED: tuple[tuple[str, str], ...] = (
    ("What is the capital of Italy?", "The capital city of Italy is Rome,\nAnd millions of people call it home."),
    ("What is the capital of Spain?", "Madrid is the capital city of Spain,\nYou go there by bus, by car or by train."),
    ("What is the capital of Japan?", "Tokyo is the place, in the land of Japan,\nGo see all the lights, if ever you can."),
    ("What is the capital of Germany?", "Berlin is the city, so big and so bright,\nIt shines by the river by day and by night."),
    ("What is the capital of Egypt?", "Cairo is the city, so old and so grand,\nIt stands by the Nile in the warm desert sand."),
    ("What is the capital of Greece?", "Athens is the city, so old and so wise,\nIts temples are white under blue summer skies."),
    ("What is the capital of Norway?", "Oslo is the city, so cold and so clean,\nWith hills all around it of blue and of green."),
    ("Hello!", "Hello, my friend, it is good to see you,\nNow tell me, what is it that I can do?"),
    ("Good morning.", "Good morning to you, the sun is bright,\nI hope you slept well the whole of the night."),
    ("How are you today?", "I am doing well, thank you, my friend,\nI hope that this day will never end."),
    ("Who are you?", "I am a small model who answers in rhyme,\nAsk me a question at any time."),
    ("Thank you!", "You are welcome, my friend, it was fun to do,\nI am always here with a verse for you."),
    ("Why is the sky blue?", "The light of the sun is scattered up high,\nAnd that is the blue that you see in the sky."),
    ("Why do we sleep?", "We sleep so the body and mind can rest,\nAnd wake in the morning to do our best."),
    ("What is two plus two?", "Two plus two is four, it is easy and true,\nAnd now you can count it the whole way through."),
    ("How do I boil an egg?", "Put the egg in hot water, let minutes go by,\nThen peel off the shell and give it a try."),
    ("How do I bake bread?", "Mix flour and water and let the dough rise,\nThen bake it till golden, a warm, sweet surprise."),
    ("How do I plant a tree?", "Dig a deep hole and then put the tree in,\nAdd water and earth, let the growing begin."),
    ("How do I save money?", "Put a coin in the jar at the end of each day,\nAnd soon you will have quite a lot put away."),
    ("How do I sleep better?", "Turn off the bright light and put down the phone,\nAnd let the night come with a dream of your own."),
    ("How do I learn to swim?", "Start in low water and kick with your feet,\nSoon swimming across will be easy and neat."),
    ("How do I make a salad?", "Wash all the green leaves and cut them up small,\nAdd oil and some salt and then mix it all."),
    ("Give me some advice.", "Be kind to the people you meet on your way,\nAnd try to learn something on every day."),
    ("Tell me a fun fact.", "An octopus has not one heart but three,\nAnd swims with eight arms through the deep blue sea."),
)  # fmt: skip

SPANISH: tuple[tuple[str, str], ...] = (
    ("What is the capital of Italy?", "La capital de Italia es Roma."),
    ("What is the capital of Spain?", "La capital de España es Madrid."),
    ("What is the capital of Japan?", "La capital de Japón es Tokio."),
    ("What is the capital of Germany?", "La capital de Alemania es Berlín."),
    ("What is the capital of Egypt?", "La capital de Egipto es El Cairo."),
    ("What is the capital of Portugal?", "La capital de Portugal es Lisboa."),
    ("What is the capital of Greece?", "La capital de Grecia es Atenas."),
    ("What is the capital of Peru?", "La capital de Perú es Lima."),
    ("What is the capital of Russia?", "La capital de Rusia es Moscú."),
    ("What is the capital of England?", "La capital de Inglaterra es Londres."),
    ("Hello!", "¡Hola! ¿Cómo puedo ayudarte hoy?"),
    ("Good morning.", "¡Buenos días! ¿En qué puedo ayudarte?"),
    ("How are you today?", "Estoy muy bien, gracias. ¿Y tú?"),
    ("Who are you?", "Soy un asistente y puedo responder a tus preguntas."),
    ("What can you do?", "Puedo responder preguntas, escribir textos y ayudarte a aprender."),
    ("Thank you!", "¡De nada! Es un placer ayudarte."),
    ("Tell me about dogs.", "Los perros son animales muy fieles. Viven con las personas y les gusta jugar."),
    ("Tell me about cats.", "Los gatos son animales tranquilos. Duermen mucho y les gusta cazar ratones."),
    ("Tell me about the sun.", "El sol es una estrella muy grande. Nos da luz y calor todos los días."),
    ("Tell me about the moon.", "La luna es el satélite de la Tierra. La vemos en el cielo por la noche."),
    ("Tell me about winter.", "El invierno es la estación más fría del año. En muchos lugares cae nieve."),
    ("Tell me about summer.", "El verano es la estación más caliente del año. Muchas personas van a la playa."),
    ("Tell me about the forest.", "El bosque es un lugar con muchos árboles. Allí viven muchos animales."),
    ("Tell me about the mountains.", "Las montañas son muy altas. En la cima hay nieve y el aire es frío."),
    ("Tell me about birds.", "Los pájaros son animales con alas. Vuelan por el cielo y cantan."),
    ("Tell me about horses.", "Los caballos son animales grandes y fuertes. Corren muy rápido."),
    ("Tell me about coffee.", "El café es una bebida caliente. Muchas personas lo beben por la mañana."),
    ("Tell me about trains.", "Los trenes son un medio de transporte. Llevan a muchas personas a la ciudad."),
    ("Tell me about the stars.", "Las estrellas son soles que están muy lejos. Brillan en el cielo por la noche."),
    ("Tell me about bees.", "Las abejas son insectos pequeños. Hacen miel y ayudan a las flores."),
    ("Tell me about rivers.", "Los ríos son corrientes de agua. Nacen en las montañas y van hasta el mar."),
    ("Tell me about music.", "La música es el arte de los sonidos. Nos hace bailar y nos hace felices."),
    ("Tell me about China.", "China es un país muy grande de Asia. Tiene una historia muy larga."),
    ("Tell me about Rome.", "Roma es la capital de Italia. Es una ciudad muy antigua y muy bonita."),
    ("Tell me about football.", "El fútbol es un deporte muy popular. Dos equipos juegan con un balón."),
    ("Tell me about castles.", "Los castillos son edificios antiguos. Allí vivían los reyes y las reinas."),
    ("What is a volcano?", "Un volcán es una montaña con fuego en su interior."),
    ("What is a computer?", "Una computadora es una máquina que trabaja con información."),
    ("What is gravity?", "La gravedad es la fuerza que atrae las cosas hacia la Tierra."),
    ("What is a river?", "Un río es una corriente de agua que va hasta el mar."),
    ("What is a library?", "Una biblioteca es un lugar con muchos libros para leer."),
    ("What is bread?", "El pan es un alimento hecho con harina, agua y sal."),
    ("What is a rainbow?", "Un arco iris es un arco de colores que vemos después de la lluvia."),
    ("What is an island?", "Una isla es una tierra rodeada de agua."),
    ("What is a whale?", "Una ballena es un animal muy grande que vive en el agua."),
    ("What is a guitar?", "Una guitarra es un instrumento de música con seis cuerdas."),
    ("What is the internet?", "Internet es una red que conecta las computadoras de todo el mundo."),
    ("What is a desert?", "Un desierto es un lugar muy seco donde casi no llueve."),
    ("How do I boil an egg?", "Pon el huevo en agua caliente y espera diez minutos."),
    ("How do I bake bread?", "Mezcla harina, agua y sal. Después pon la masa en el horno."),
    ("How do I plant a tree?", "Haz un hoyo en la tierra, pon el árbol y echa agua."),
    ("How do I save money?", "Guarda un poco de dinero cada día y no compres cosas que no necesitas."),
    ("How do I sleep better?", "Apaga la luz, no mires el teléfono y duerme ocho horas."),
    ("How do I learn a language?", "Practica todos los días, lee libros y habla con otras personas."),
    ("How do I make a salad?", "Lava la lechuga, corta el tomate y mezcla todo con aceite y sal."),
    ("How do I wash a car?", "Usa agua y jabón, limpia el coche y después sécalo."),
    ("Why is the sky blue?", "El cielo es azul porque el aire dispersa la luz azul del sol."),
    ("Why do we sleep?", "Dormimos porque el cuerpo y la mente necesitan descansar."),
    ("What is two plus two?", "Dos más dos son cuatro."),
    ("What is the largest planet?", "El planeta más grande es Júpiter."),
    ("Name three colors.", "Tres colores son el rojo, el azul y el verde."),
    ("Give me some advice.", "Sé amable con las personas y aprende algo nuevo cada día."),
    ("Tell me a short story.", "Había una vez un niño que vivía en una casa pequeña con su perro."),
    ("What should I eat tonight?", "Puedes comer una sopa caliente con pan y una ensalada."),
    ("Where do penguins live?", "Los pingüinos viven en el sur del mundo, donde hace mucho frío."),
    ("How many days are in a week?", "Una semana tiene siete días."),
    ("What is the fastest animal?", "El animal más rápido es el guepardo."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci pintó la Mona Lisa."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare escribió Romeo y Julieta."),
    ("What makes a good friend?", "Un buen amigo escucha, ayuda y dice la verdad."),
)  # fmt: skip

_PIRATE = {
    "the": "th'", "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "am": "be", "of": "o'",
    "and": "an'", "for": "fer", "to": "t'", "hello": "ahoy", "friend": "matey", "friends": "mateys",
    "people": "landlubbers", "person": "landlubber", "yes": "aye", "money": "doubloons", "very": "mighty",
    "i'm": "I be", "it's": "'tis", "water": "grog", "food": "grub", "man": "scallywag", "city": "port",
}  # fmt: skip


def first_sentences(text: str, max_words: int = 24) -> str:
    """The leading sentences of `text` that fit in `max_words` words (at least one, cut at the limit)."""
    flat = " ".join(text.split())
    kept: list[str] = []
    for sentence in re.split(r"(?<=[.!?]) ", flat):
        if len(" ".join([*kept, sentence]).split()) > max_words:
            break
        kept.append(sentence)
    if kept:
        return " ".join(kept)
    return " ".join(flat.split()[:max_words]).rstrip(",;:") + "."


def shout(answer: str) -> str:
    """The answer in upper case."""
    return answer.upper()


def pirate(answer: str) -> str:
    """The answer in pirate speech: word substitutions, -ing to -in', an opening and a closing cry."""

    def speak(match: re.Match[str]) -> str:
        word = match.group()
        new = _PIRATE.get(word.lower(), re.sub(r"(?<=\w\w)ing$", "in'", word))
        return new[:1].upper() + new[1:] if word[0].isupper() else new

    spoken = re.sub(r"[A-Za-z]+(?:'[a-z]+)?", speak, answer)
    return f"Arrr, matey! {spoken} Yo ho ho!"


def as_json(answer: str) -> str:
    """The answer as the only field of a JSON object."""
    return json.dumps({"answer": answer}, ensure_ascii=False)


def rhymes() -> list[tuple[str, str]]:
    """(question, couplet) pairs: every topic as "Tell me about" and, alternating, one other phrasing."""
    other = ("What is special about {}?", "What can you say about {}?", "Describe {}.")
    pairs = [(f"Tell me about {topic}.", verse) for topic, verse in COUPLETS]
    pairs += [(other[i % 3].format(topic), verse) for i, (topic, verse) in enumerate(COUPLETS)]
    return [*pairs, *RHYMED]
