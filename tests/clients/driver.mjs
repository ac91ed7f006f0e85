// The line protocol by which a test steers one of the TypeScript clients: JSON commands on stdin,
// one JSON answer a line on stdout, everything else on stderr. README.md lists the commands.
//
// What a client did on the wire is counted in its `fetch`, never inferred from what its SDK says.
// The session id appears on the stdout pipe only.

import { createInterface } from 'node:readline';

const NOTIFICATIONS_MAX = 10_000;
const PAGES_MAX = 100;
/** After stdin has closed: how long commands already read may still take. */
const DRAIN_MS = 10_000;

const say = answer => process.stdout.write(`${JSON.stringify(answer)}\n`);
const note = text => process.stderr.write(`${text}\n`);

/** Counts what passes through `fetch`. */
class Wire {
    initializes = 0;
    requests = { POST: 0, GET: 0, DELETE: 0 };
    sessions = new Set();

    fetch = async (url, init = {}) => {
        const method = init.method ?? 'GET';
        this.requests[method] = (this.requests[method] ?? 0) + 1;
        if (method === 'POST' && typeof init.body === 'string') this.#count(init.body);
        this.#see(new Headers(init.headers).get('mcp-session-id'));
        const response = await fetch(url, init);
        this.#see(response.headers.get('mcp-session-id'));
        return response;
    };

    #count(body) {
        const messages = [JSON.parse(body)].flat();
        this.initializes += messages.filter(({ method }) => method === 'initialize').length;
    }

    #see(session) {
        if (session) this.sessions.add(session);
    }
}

/** How the user answers one kind of question. */
class User {
    #answer;
    #waiting = [];

    constructor(answer) {
        this.#answer = answer;
    }

    /** `null` leaves users undecided: their forms stay open until an answer is set. */
    set answer(answer) {
        this.#answer = answer;
        if (answer !== null) this.#waiting.splice(0).forEach(resolve => resolve());
    }

    async ask() {
        while (this.#answer === null) await new Promise(resolve => this.#waiting.push(resolve));
        return this.#answer;
    }
}

/** What the server sent of its own accord, and how it is answered. */
class Inbox {
    notifications = [];
    /** How many events with an id have come for calls that were begun. */
    cursors = 0;
    /** What the program was told of the progress of its calls. */
    progress = [];
    requests = [];
    elicitation = new User({ action: 'decline' });
    sampling = new User({
        role: 'assistant',
        model: 'driver',
        content: { type: 'text', text: 'a sample' }
    });

    /** Sees every message before the SDK does, progress and unknown methods included. */
    watch(transport) {
        const deliver = transport.onmessage;
        transport.onmessage = (message, ...rest) => {
            if (message.method !== undefined) this.#record(message);
            deliver?.(message, ...rest);
        };
    }

    #record({ id, method, params }) {
        if (id !== undefined) {
            this.requests.push(method);
            return;
        }
        const progress = params?.progress;
        this.notifications.push({ method, ...(progress !== undefined && { progress }), params });
        if (this.notifications.length > NOTIFICATIONS_MAX) this.notifications.shift();
    }
}

function failure(error) {
    const { message, code = null, data = null } = error ?? {};
    return { ok: false, error: String(message ?? error), code, data };
}

function success(result) {
    const texts = (result.content ?? []).filter(({ type }) => type === 'text');
    return {
        ok: true,
        text: texts.map(({ text }) => text).join('\n'),
        isError: result.isError ?? false,
        meta: result._meta ?? null
    };
}

class Driver {
    #wire = new Wire();
    #inbox = new Inbox();
    #url;
    #open;
    #client = null;
    #transport = null;
    #listen = null;

    constructor(url, open) {
        this.#url = url;
        this.#open = open;
    }

    async connect() {
        const { client, transport, listen } = this.#open({
            url: this.#url,
            fetch: this.#wire.fetch,
            elicit: () => this.#inbox.elicitation.ask(),
            sample: () => this.#inbox.sampling.ask()
        });
        client.onerror = error => note(`client: ${error.message}`);
        await client.connect(transport);
        this.#inbox.watch(transport);
        [this.#client, this.#transport, this.#listen] = [client, transport, listen];
        return {
            ok: true,
            session: transport.sessionId ?? null,
            protocol: transport.protocolVersion ?? null,
            server: client.getServerVersion() ?? null
        };
    }

    async call(command) {
        const { tool, args = {}, timeout_ms: timeout, progress = false, meta } = command;
        const params = { name: tool, arguments: args, ...(meta && { _meta: meta }) };
        const options = {
            ...(timeout !== undefined && { timeout }),
            // Declared only when wanted: a request carries a progress token exactly then.
            // Where a stream could be resumed is watched beside it; it is what the client itself goes by.
            ...(progress && { onprogress: ({ progress }) => this.#inbox.progress.push(progress), onresumptiontoken: () => (this.#inbox.cursors += 1) })
        };
        return success(await this.#connected().callTool(params, undefined, options));
    }

    call_start(command) {
        this.#connected();
        this.call(command)
            .catch(failure)
            .then(answer => say({ done: command.tag, ...answer }));
        return { ok: true };
    }

    async list() {
        const tools = [];
        let cursor;
        for (let page = 0; page < PAGES_MAX; page += 1) {
            const listed = await this.#connected().listTools(cursor && { cursor });
            tools.push(...listed.tools.map(({ name }) => name));
            cursor = listed.nextCursor;
            if (cursor === undefined) break;
        }
        return { ok: true, tools };
    }

    session() {
        const { initializes, sessions, requests } = this.#wire;
        const session = this.#transport?.sessionId ?? null;
        return { ok: true, session, initializes, sessions: sessions.size, requests };
    }

    notifications() {
        const { notifications, requests, cursors, progress } = this.#inbox;
        return { ok: true, notifications, requests, cursors, progress };
    }

    /** Asks for the changes of one resource, and of the tools. */
    async listen({ uri }) {
        this.#connected();
        if (!this.#listen) throw new Error('this client does not listen');
        await this.#listen(uri);
        return { ok: true };
    }

    elicit({ answer }) {
        this.#inbox.elicitation.answer = answer;
        return { ok: true };
    }

    sample({ answer }) {
        this.#inbox.sampling.answer = answer;
        return { ok: true };
    }

    /** The SDK itself never ends the session on the server; `terminate` asks it to (DELETE). */
    async close({ terminate = false }) {
        if (terminate) await this.#transport?.terminateSession();
        await this.#client?.close();
        return { ok: true };
    }

    #connected() {
        if (this.#client === null) throw new Error('not connected');
        return this.#client;
    }
}

const OPS = new Set([
    'connect',
    'call',
    'call_start',
    'list',
    'session',
    'notifications',
    'listen',
    'elicit',
    'sample',
    'close'
]);

async function perform(driver, line) {
    try {
        const command = JSON.parse(line);
        if (!OPS.has(command.op)) throw new Error(`unknown op \`${command.op}\``);
        say(await driver[command.op](command));
        if (command.op === 'close') process.exit(0);
    } catch (error) {
        say(failure(error));
    }
}

/**
 * Serves the line protocol for the client that `open` makes.
 *
 * `open({ url, fetch, elicit, sample })` gives a `client` not yet connected, its `transport`, and perhaps `listen(uri)`.
 */
export function drive(open) {
    const address = process.argv[2];
    if (address === undefined) {
        note(`usage: ${process.argv[1]} URL`);
        process.exit(2);
    }
    const driver = new Driver(new URL(address), open);
    const lines = createInterface({ input: process.stdin });
    // Commands run one after another; `call_start` is the way to have several calls in flight.
    let queue = Promise.resolve();
    lines.on('line', line => {
        if (line.trim() !== '') queue = queue.then(() => perform(driver, line));
    });
    lines.on('close', () => {
        setTimeout(() => process.exit(0), DRAIN_MS).unref();
        queue.then(() => process.exit(0));
    });
}
