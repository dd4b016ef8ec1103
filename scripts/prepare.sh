#!/usr/bin/env bash
# prepare.sh RECIPE [--work DIR]
#
# Raw text to fairseq's binary data: gets the corpus (data/), trains the joint BPE model and encodes
# all splits (text/), binarizes (data-bin/). Each step runs only if it is not done yet. RECIPE is a
# file of configs/recipes/; the work folder is exp/RECIPE unless --work says otherwise.

# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
start_script "$@"
no_more_arguments

corpus=$ROOT/data-prep/$RECIPE_CORPUS
[[ -x $corpus/get.sh ]] || die "recipe $RECIPE_NAME: there is no $corpus/get.sh for its corpus"

data=() pieces=()
for split in train valid test; do
    for lang in "$RECIPE_SOURCE_LANG" "$RECIPE_TARGET_LANG"; do
        data+=("$WORK/data/$split.$lang")
        pieces+=("$WORK/text/$split.$lang")
    done
done
model=("$WORK/text/sentencepiece.bpe.model" "$WORK/text/text.json")

# fairseq-preprocess refuses a folder that has dictionaries: it writes a new one, which then takes
# the old one's place as a whole.
binarize() {
    local new=$WORK/data-bin.tmp
    rm -rf "$new"
    fairseq-preprocess --source-lang "$RECIPE_SOURCE_LANG" --target-lang "$RECIPE_TARGET_LANG" \
        --joined-dictionary --destdir "$new" \
        --trainpref "$WORK/text/train" --validpref "$WORK/text/valid" --testpref "$WORK/text/test"
    # The log holds times and paths: with it the same data would not have the same checksum.
    rm -f "$new/preprocess.log"
    cp "${model[@]}" "$new/"
    rm -rf "$WORK/data-bin"
    mv "$new" "$WORK/data-bin"
}

run_step data --input "$corpus" --output "${data[@]}" -- "$corpus/get.sh" "$WORK/data"

run_step bpe \
    --input "${data[@]:0:2}" \
    --option "vocab_size=$RECIPE_VOCAB_SIZE" \
    "source_lang=$RECIPE_SOURCE_LANG" "target_lang=$RECIPE_TARGET_LANG" \
    --output "${model[@]}" \
    -- tool text train --data "$WORK/data" --output "$WORK/text" \
    --source-lang "$RECIPE_SOURCE_LANG" --target-lang "$RECIPE_TARGET_LANG" \
    --vocab-size "$RECIPE_VOCAB_SIZE"

run_step encode --input "${data[@]}" "${model[@]}" --output "${pieces[@]}" \
    -- tool text corpus --data "$WORK/data" --model "$WORK/text" \
    --output "$WORK/text"

run_step binarize --input "${pieces[@]}" "${model[@]}" --output "$WORK/data-bin" -- binarize
