"use strict";
// Where the data come from: packed in the page, or, while a run is watched, from the server beside it.
(() => {
const POLL_MS = 3000;

const unpack = async (id) => {
  const packed = document.getElementById(id).textContent.trim();
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
};

/** Everything but the tokens. */
Report.load = () => unpack("data");

const chunks = new Map();
/**
 * A sample with its tokens, their log-probs and so on. They lie in the page in packs, unpacked when first asked for;
 * a sample that came from the server has them already.
 */
Report.whole = async (sample) => {
  if (sample.tokens || sample.pack === undefined) return sample;
  const [pack, place] = sample.pack;
  if (!chunks.has(pack)) chunks.set(pack, unpack(`tokens-${pack}`));
  return Object.assign(sample, (await chunks.get(pack))[place]);
};

/** Text of a prompt, whether it was one string or messages. */
Report.promptText = (sample) =>
  typeof sample.prompt === "string" ? sample.prompt : (sample.prompt ?? []).map(Report.messageText).join("\n");

Report.messageText = (message) => {
  const content = message?.content ?? message;
  return typeof content === "string" ? content : JSON.stringify(content);
};

/** The beginning of a prompt on one line: of messages, of the last one. */
Report.promptStart = (sample, most) => {
  const text = typeof sample.prompt === "string" ? sample.prompt : Report.messageText(sample.prompt?.at?.(-1) ?? "");
  return text.slice(0, most).replaceAll(/\s+/g, " ");
};

/** What a text search reads, on one line and in small letters; made once per sample. */
Report.searchText = async (sample) => {
  if (sample.searched === undefined) {
    const { tokens } = await Report.whole(sample);
    sample.searched = `${Report.promptText(sample)}\n${(tokens ?? []).join("")}`.toLowerCase().replaceAll(/\s+/g, " ");
  }
  return sample.searched;
};

/** Ask the server again and again; `changed` gets fresh data. */
Report.watch = (changed) => {
  const node = document.getElementById("live");
  let seen = null;
  const ask = async () => {
    try {
      const answer = await fetch(`data.json${location.search}`, { cache: "no-cache" });
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      const mark = answer.headers.get("ETag");
      if (mark === null || mark !== seen) changed(await answer.json());
      seen = mark;
      node.textContent = "live";
      node.className = "on";
    } catch (error) {
      node.textContent = "not connected";
      node.className = "off";
    }
    if (Report.data.live) setTimeout(ask, POLL_MS);
    else node.textContent = node.className = "";
  };
  setTimeout(ask, POLL_MS);
};
})();
