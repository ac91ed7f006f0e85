// The client that the official suite's client scenarios are run with: the TypeScript SDK of the 2.x
// line, which goes through a gateway. The suite starts a server for the scenario and appends its URL.
//
//   GATEWAY_URL=… TARGET_NOTE=… CLIENT_ERA=legacy|modern node conformance-client.mjs URL
//
// The gateway cannot know that URL when it is started; so it reaches the server through a forwarder,
// which looks for the server's port in the file TARGET_NOTE. What the client does is the same in
// each scenario: all that a server offers is listed and used.

import { writeFileSync } from 'node:fs';

import { load } from './packages.mjs';

const { Client, StreamableHTTPClientTransport } = load('@modelcontextprotocol/client');

const { GATEWAY_URL, TARGET_NOTE, CLIENT_ERA } = process.env;
const { MCP_CONFORMANCE_CONTEXT, MCP_CONFORMANCE_PROTOCOL_VERSION } = process.env;
const SAMPLES = { string: 'a', number: 2, integer: 2, boolean: true, array: [], object: {} };

/** Arguments that fit a schema, for tools of which the scenario does not say what it wants. */
function argumentsFor(schema) {
    const required = schema.required ?? [];
    return Object.fromEntries(
        required.map(name => [name, SAMPLES[schema.properties?.[name]?.type] ?? 'a'])
    );
}

/** What `promise` gives, or else nothing: the scenario judges by what comes to its server. */
async function tried(promise, otherwise) {
    try {
        return await promise;
    } catch (error) {
        console.error(error.message);
        return otherwise;
    }
}

async function useTools(client) {
    const { tools } = await client.listTools();
    const wanted = JSON.parse(MCP_CONFORMANCE_CONTEXT ?? '{}').toolCalls;
    const calls =
        wanted ??
        tools.map(({ name, inputSchema }) => ({ name, arguments: argumentsFor(inputSchema) }));
    for (const call of calls) await tried(client.callTool(call));
}

// A gateway that has to answer `initialize` for a server that is slow promises more than there may be.
async function useResources(client) {
    const { resources } = await tried(client.listResources(), { resources: [] });
    for (const { uri } of resources) await client.readResource({ uri });
}

async function usePrompts(client) {
    const { prompts } = await tried(client.listPrompts(), { prompts: [] });
    for (const { name } of prompts) await client.getPrompt({ name });
}

function makeClient() {
    const mode = CLIENT_ERA === 'modern' ? { pin: MCP_CONFORMANCE_PROTOCOL_VERSION } : 'legacy';
    const client = new Client(
        { name: 'through-a-gateway', version: '1.0.0' },
        {
            capabilities: { elicitation: { form: { applyDefaults: true } }, sampling: {} },
            versionNegotiation: { mode }
        }
    );
    client.setRequestHandler('elicitation/create', () => ({ action: 'accept', content: {} }));
    return client;
}

writeFileSync(TARGET_NOTE, new URL(process.argv[2]).port);
const client = makeClient();
await client.connect(new StreamableHTTPClientTransport(new URL(GATEWAY_URL)));
const offered = client.getServerCapabilities() ?? {};
if (offered.tools) await useTools(client);
if (offered.resources) await useResources(client);
if (offered.prompts) await usePrompts(client);
await client.close();
