#!/usr/bin/env bash
# prepare.sh RECIPE [--work DIR] [--dry-run] [--vocab-size N | --merges N] [--mirror ADDRESS or other options of the corpus]
#
# Raw text to fairseq's binary data: gets the corpus (data/), cleans and tokenizes it (tok/), trains the
# joint BPE model and encodes all splits (text/), binarizes (data-bin/), and signs the result (data.json).
# Each step runs only if it is not done yet. RECIPE is a file of configs/recipes/; the work folder is
# exp/RECIPE unless --work says otherwise. The corpus and its options: data-prep/CORPUS/get.sh --help.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"
no_more_arguments

corpus=$ROOT/data-prep/$RECIPE_CORPUS
[[ -x $corpus/get.sh ]] || die "recipe $RECIPE_NAME: there is no $corpus/get.sh for its corpus"
folders=("$corpus")
# What get.sh does there is that of another corpus.
[[ ! -e $corpus/uses ]] || folders+=("$ROOT/data-prep/$(<"$corpus/uses")")

data=() tokens=() pieces=()
for lang in "$RECIPE_SOURCE_LANG" "$RECIPE_TARGET_LANG"; do
    for part in "${RECIPE_DATA[@]}"; do
        data+=("$WORK/data/$part.$lang")
    done
    for split in train valid test; do
        tokens+=("$WORK/tok/$split.$lang")
        pieces+=("$WORK/text/$split.$lang")
    done
done
model=("$WORK/text/$RECIPE_BPE_MODEL" "$WORK/text/text.json")
if [[ $RECIPE_MERGES ]]; then
    size=(merges "$RECIPE_MERGES")
else
    size=(vocab_size "$RECIPE_VOCAB_SIZE")
fi
langs=(--source-lang "$RECIPE_SOURCE_LANG" --target-lang "$RECIPE_TARGET_LANG")

# What the user names is an input too: text files, and the table of a mirror's own archives.
named=()
for argument in "${DATA_ARGS[@]}"; do
    [[ -f $argument ]] && named+=("$argument")
    [[ -f $argument/archives.tsv ]] && named+=("$argument/archives.tsv")
done

# The files of fairseq-preprocess in a fraction of its time (rope_fairseq/corpus/binarize.py). A new folder
# takes the old one's place as a whole.
binarize() {
    local new=$WORK/data-bin.tmp
    run rm -rf "$new"
    [[ -z ${DRY_RUN:-} ]] || printf '%s\n' "# the same files as from:" \
        "# fairseq-preprocess ${langs[*]} --joined-dictionary --destdir $new \\" \
        "#     --trainpref $WORK/text/train --validpref $WORK/text/valid --testpref $WORK/text/test"
    run tool corpus binarize --text "$WORK/text" --output "$new"
    run rm -rf "$WORK/data-bin"
    run mv "$new" "$WORK/data-bin"
}

run_step data --input "${folders[@]}" "${named[@]}" \
    --option "langs=${langs[*]}" "data=${DATA_ARGS[*]}" \
    --output "${data[@]}" "$WORK/data/source.json" \
    -- "$corpus/get.sh" "$WORK/data" "${langs[@]}" "${DATA_ARGS[@]}" "${DOWNLOADS[@]}"

run_step clean --input "${data[@]}" --option "rules=${RECIPE_CLEAN[*]}" "langs=${langs[*]}" \
    --output "${tokens[@]}" "$WORK/tok/words.tsv" "$WORK/tok/text.json" "$WORK/tok/cleaning.json" \
    -- tool corpus clean --data "$WORK/data" --output "$WORK/tok" "${langs[@]}" "${RECIPE_CLEAN[@]}"

run_step bpe --input "$WORK/tok/words.tsv" "$WORK/tok/text.json" --option "${size[0]}=${size[1]}" \
    --output "${model[@]}" \
    -- tool corpus bpe --tokens "$WORK/tok" --output "$WORK/text" "--${size[0]//_/-}" "${size[1]}"

run_step encode --input "${tokens[@]}" "$WORK/tok/text.json" "${model[@]}" --output "${pieces[@]}" \
    -- tool corpus encode --tokens "$WORK/tok" --model "$WORK/text" --output "$WORK/text"

run_step binarize --input "${pieces[@]}" "${model[@]}" --output "$WORK/data-bin" -- binarize

run_step sign --input "${pieces[@]}" "$WORK/tok/cleaning.json" "$WORK/data/source.json" \
    --output "$WORK/data.json" \
    -- tool corpus signature --text "$WORK/text" --tokens "$WORK/tok" --corpus "$RECIPE_CORPUS" \
    --dictionary "$WORK/data-bin/dict.$RECIPE_SOURCE_LANG.txt" \
    --source "$WORK/data/source.json" --output "$WORK/data.json"
